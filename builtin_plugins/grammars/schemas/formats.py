"""The `format`s of JSON Schema as regular expressions.

A grammar enforces these exactly; any other format is an annotation, as JSON Schema has it.
"""

from __future__ import annotations

import string
from typing import NamedTuple

_HEX = "[0-9a-fA-F]"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # no 0000
)
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
# A leap second comes at the end of a day of UTC; other offsets are rejected.
_TIME = (
    rf"(?:{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR}:[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
_DURATION_TIME = (
    "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"  # no part left out between
)
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = f"{_HEX}{{1,4}}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST}",
        f"::(?:{_GROUP}:){{5}}{_LAST}",
        f"(?:{_GROUP})?::(?:{_GROUP}:){{4}}{_LAST}",
        f"(?:(?:{_GROUP}:)?{_GROUP})?::(?:{_GROUP}:){{3}}{_LAST}",
        f"(?:(?:{_GROUP}:){{0,2}}{_GROUP})?::(?:{_GROUP}:){{2}}{_LAST}",
        f"(?:(?:{_GROUP}:){{0,3}}{_GROUP})?::{_GROUP}:{_LAST}",
        f"(?:(?:{_GROUP}:){{0,4}}{_GROUP})?::{_LAST}",
        f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::)",
    ]
)

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
# No expression checks the Punycode after xn--, so that no label begins with it.
_ASCII_LABEL = (
    r"(?:[^xX.][^.]*|[xX](?:[^nN.][^.]*)?|[xX][nN](?:[^.\-][^.]*)?|[xX][nN]-(?:[^.\-][^.]*)?)"
)
_ASCII_LABELS = rf"{_ASCII_LABEL}(?:\.{_ASCII_LABEL})*"

_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_HOSTNAME}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])"

_PLAIN = r"a-zA-Z0-9\-._~!$&'()*+,;="
_PERCENT = f"%{_HEX}{{2}}"
_SEGMENT = f"(?:[{_PLAIN}:@]|{_PERCENT})"
_HOST = (
    rf"(?:\[(?:{_IPV6}|[vV]{_HEX}+\.[{_PLAIN}:]+)\]|(?:[{_PLAIN}]|{_PERCENT})*)"  # has IPv4 within
)
_AUTHORITY = f"(?:(?:[{_PLAIN}:]|{_PERCENT})*@)?{_HOST}(?::[0-9]*)?"
_ROOTED = f"//{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_TAIL = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.\-]*:(?:{_ROOTED}|{_SEGMENT}+(?:/{_SEGMENT}*)*|){_TAIL}"
_RELATIVE = (
    f"(?:{_ROOTED}|(?:[{_PLAIN}@]|{_PERCENT})+(?:/{_SEGMENT}*)*|){_TAIL}"  # no colon before a slash
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_UUID = f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}"

_DIGITS, _LETTERS = frozenset(string.digits), frozenset(string.ascii_letters)


class Format(NamedTuple):
    """A format that is enforced.

    Attributes:
        expressions: each of them matches the whole text.
        shortest: characters that a text has at least.
        longest: characters that it has at most; None has no limit.
        has: characters that each text has.
        within: characters that a text may have; None is any.
    """

    expressions: tuple[str, ...]
    shortest: int = 0
    longest: int | None = None
    has: frozenset[str] = frozenset()
    within: frozenset[str] | None = None

    def is_apart(self, other: Format) -> bool:
        """Return whether no text is of both formats."""
        return (
            _is_longer(self, other)
            or _is_longer(other, self)
            or bool(other.within is not None and self.has - other.within)
            or bool(self.within is not None and other.has - self.within)
        )


def _is_longer(first: Format, other: Format) -> bool:
    return other.longest is not None and first.shortest > other.longest


_MARKS = _DIGITS | frozenset("-:.+TtZz")

FORMATS = {
    "date": Format((_DATE,), 10, 10, frozenset("-"), _DIGITS | {"-"}),
    "date-time": Format((f"{_DATE}[tT]{_TIME}",), 20, None, frozenset("-:"), _MARKS),
    "duration": Format((_DURATION,), 3, None, frozenset("P"), _DIGITS | frozenset("PYMWDTHS")),
    "email": Format((_EMAIL,), 3, None, frozenset("@")),
    "hostname": Format(
        (_HOSTNAME, "[^@]{1,253}", _ASCII_LABELS), 1, 253, within=_DIGITS | _LETTERS | {"-", "."}
    ),
    "ipv4": Format((_IPV4,), 7, 15, frozenset("."), _DIGITS | {"."}),
    "ipv6": Format(
        (_IPV6,), 2, 45, frozenset(":"), _DIGITS | frozenset("abcdefABCDEF") | {":", "."}
    ),
    "json-pointer": Format((_POINTER,)),
    "relative-json-pointer": Format((f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",), 1),
    "time": Format((_TIME,), 9, None, frozenset(":"), _DIGITS | frozenset(":.+-Zz")),
    "uri": Format((_URI,), 2, None, frozenset(":")),
    "uri-reference": Format((f"(?:{_URI}|{_RELATIVE})",)),
    "uuid": Format((_UUID,), 36, 36, frozenset("-"), _DIGITS | frozenset("abcdefABCDEF-")),
}
"""By their names in JSON Schema."""
