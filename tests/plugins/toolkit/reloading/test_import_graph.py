"""Imports among the modules of a package: dependencies and another name of the package."""

import pytest

from hardpoint.toolkit.reloading.import_graph import dependencies, renamed

SOURCES = {
    "acme": "from .dry import Dry\n",
    "acme.dry": "from . import shared\nimport json\n",
    "acme.shared": "from .deep.sums import total\n",
    "acme.deep": "",
    "acme.deep.sums": "from ..numbers import ONE\n",
    "acme.numbers": "ONE = 1\n",
    "acme.broken": "from acme import (",
    "acme.xtc": "def late():\n    import acme.numbers\n",
}


@pytest.mark.parametrize(
    ("module", "expected"),
    {
        "acme.xtc": {"acme.xtc", "acme.numbers"},
        "acme.dry": {"acme", "acme.dry", "acme.shared", "acme.deep.sums", "acme.numbers"},
        "acme.broken": {"acme.broken"},
        "acme.numbers": {"acme.numbers"},
        "elsewhere": set(),
    }.items(),
)
def test_dependencies_are_the_imports_of_imports(module, expected):
    sources = {name: text.encode() for name, text in SOURCES.items()}
    assert dependencies(module, sources, {"acme", "acme.deep"}) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    {
        "import acme": "import other as acme",
        "import acme.dry": "import other.dry, other as acme",
        "import acme.dry as d, json": "import other.dry as d, json",
        "import json, acme": "import json, other as acme",
        "from acme import dry": "from other import dry",
        "from  acme.dry import Dry": "from other.dry import Dry",
        "é = 1; from acme.dry import Dry": "é = 1; from other.dry import Dry",
        "if x:\n    from acme import (\n        dry,\n    )\n": (
            "if x:\n    from other import (\n        dry,\n    )\n"
        ),
        "from .acme import dry": "from .acme import dry",
        "from acme_other import dry": "from acme_other import dry",
        "import acmes.dry": "import acmes.dry",
        "text = 'import acme'": "text = 'import acme'",
    }.items(),
)
def test_only_imports_of_the_package_are_renamed(source, expected):
    assert renamed(source.encode(), "acme", "other").decode() == expected


@pytest.mark.parametrize("source", [b"import acme\ndef half(", b"\0"])
def test_source_code_that_cannot_be_parsed_stays(source):
    assert renamed(source, "acme", "other") == source
