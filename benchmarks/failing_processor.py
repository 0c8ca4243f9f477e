"""A logits processor that fails for the requests that ask for it."""

from __future__ import annotations

import math
from typing import Annotated

import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Meta, Phase, Rows


class FailsAt(LogitsProcessor):
    """Raises once a request has a number of output tokens, after damaging all rows that it got.

    Enabled by `--set plugins.enable='["failing_processor:FailsAt"]'`, and used by
    `"plugin_args": {"fails_at": {"tokens": 5}}`.
    """

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            tokens: output tokens after which it fails.
        """

        tokens: Annotated[int, Meta(ge=0)]

    def apply(self, logits: torch.Tensor, rows: Rows[Arguments]) -> torch.Tensor:
        """Return the logits, or raise."""
        limits = rows.arguments()
        for request, arguments in zip(rows.requests, limits, strict=True):
            if len(request.output_token_ids) >= arguments.tokens:
                logits.fill_(math.nan)
                raise RuntimeError(f"failed after {arguments.tokens} tokens, as the request asked")
        return logits
