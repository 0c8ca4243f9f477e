"""Call logits code of others: one row at a time, once per position, with checks of its result."""

from .adapted import AdaptedProcessor, ExternalProcessor, parameter_names, signature_text
from .row_calls import (
    CallSignature,
    OwnObjects,
    RequestProcessor,
    ResultCache,
    RowwiseProcessor,
    call_signature,
    drafts_of,
    is_transformers_form,
    prompt_of,
    with_ids,
)
from .tensor_checks import HandedOver

__all__ = [
    "AdaptedProcessor",
    "CallSignature",
    "ExternalProcessor",
    "HandedOver",
    "OwnObjects",
    "RequestProcessor",
    "ResultCache",
    "RowwiseProcessor",
    "call_signature",
    "drafts_of",
    "is_transformers_form",
    "parameter_names",
    "prompt_of",
    "signature_text",
    "with_ids",
]
