"""Models of the Hugging Face hub by name, in the cache of huggingface_hub."""

from .files import (
    HubName,
    check_hub_settings,
    fetch_files,
    hub_name,
    quantization_of,
    select_files,
)

__all__ = [
    "HubName",
    "check_hub_settings",
    "fetch_files",
    "hub_name",
    "quantization_of",
    "select_files",
]
