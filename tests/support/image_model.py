"""A small random model that takes images, with a chat template that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .gemma_images import IMAGE, write_model

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}"
    "{% elif message.role != 'system' %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}model:"
)


def write_image_model(folder: Path) -> Path:
    """Write it; return the folder."""
    write_model(folder, num_hidden_layers=1, layer_types=None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def settings(**tables: Any) -> dict[str, Any]:
    """Return a small configuration for it."""
    return {"dtype": "float32", "max_model_len": 512, "kv_cache": {"block_size": 8}, **tables}
