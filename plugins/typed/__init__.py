"""Options, arguments and state of plugins as types, and their conversion from plain data.

The lowest layer but the errors: `convert` turns data into a declared type, or raises an error that
names the field, its value and the expectation. Configuration, requests and the wire use it.
"""

from .convert import (
    Arguments,
    Options,
    State,
    Strict,
    attribute_docs,
    check_text,
    convert,
    copied,
    is_list,
    join_path,
    nearest_names,
    parse_value,
    plain_data,
    prepared,
    prepared_type,
    reason_of,
    shown,
    split_setting,
    suggest,
    walk_structs,
)
from .describing import FieldDoc
from .json_schemas import json_schema, schema_components
from .plain_values import stable_bytes, toml_text
from .read_only_values import ReadOnlyDict, ReadOnlyList, read_only

__all__ = [
    "Arguments",
    "FieldDoc",
    "Options",
    "ReadOnlyDict",
    "ReadOnlyList",
    "State",
    "Strict",
    "attribute_docs",
    "check_text",
    "convert",
    "copied",
    "is_list",
    "join_path",
    "json_schema",
    "nearest_names",
    "parse_value",
    "plain_data",
    "prepared",
    "prepared_type",
    "read_only",
    "reason_of",
    "schema_components",
    "shown",
    "split_setting",
    "stable_bytes",
    "suggest",
    "toml_text",
    "walk_structs",
]
