"""Formats of JSON schemas: known ones are enforced exactly, others are annotations."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random

import pytest
from support.schema_grammars import compiled, takes

from hardpoint.builtin_plugins.grammars.schemas.formats import FORMATS
from hardpoint.builtin_plugins.grammars.validation import validation_error
from hardpoint.errors import shown

RIGHT = {
    "date": [
        "2020-02-29",
        "2000-02-29",
        "1999-12-31",
        "0001-01-01",
        "2400-02-29",
    ],
    "time": [
        "23:59:60Z",
        "08:30:06.283185Z",
        "08:30:06+00:20",
        "23:59:59-08:00",
        "23:59:60+00:00",
    ],
    "date-time": [
        "1963-06-19T08:30:06.283185Z",
        "1990-12-31T23:59:59.999-08:00",
        "1998-12-31T23:59:60Z",
        "1963-06-19t08:30:06z",
    ],
    "duration": [
        "P4DT12H30M5S",
        "P4Y",
        "PT0S",
        "P0D",
        "P1M",
        "PT1M",
        "PT36H",
        "P1DT12H",
        "P2W",
    ],
    "email": [
        "joe.bloggs@example.com",
        "te~st@example.com",
        "~test@example.com",
        "test~@example.com",
        '"joe bloggs"@example.com',
        '"joe..bloggs"@example.com',
        '"joe@bloggs"@example.com',
        "joe.bloggs@[127.0.0.1]",
        "joe.bloggs@[IPv6:::1]",
        "te.s.t@example.com",
    ],
    "hostname": [
        "www.example.com",
        "a-b.c",
        "hostname",
        "host-name",
        "h0stn4me",
        "1host",
        "a" * 63,
        ".".join(["a" * 49] * 5) + ".abc",
        "ab--c",
    ],
    "ipv4": [
        "192.168.0.1",
        "87.10.0.1",
        "0.0.0.0",
        "255.255.255.255",
    ],
    "ipv6": [
        "::1",
        "::abef",
        "::",
        "::42:ff:1",
        "d6::",
        "1:d6::42",
        "1::d6:192.168.0.1",
        "1:2::192.168.0.1",
        "::ffff:192.168.0.1",
        "1:2:3:4:5:6:7:8",
        "1::2",
        "1:2:3:4:5:6:7::",
        "::2:3:4:5:6:7:8",
    ],
    "json-pointer": [
        "/foo/bar~0/baz~1/%a",
        "",
        "/",
        "/foo/",
        "/foo//bar",
        "/ ",
        "/~1.1",
    ],
    "relative-json-pointer": [
        "1",
        "0/foo/bar",
        "2/0/baz/1/zip",
        "0#",
        "120/foo/bar",
    ],
    "uri": [
        "http://foo.bar/?baz=qux#quuz",
        "http://foo.com/blah_(wikipedia)_blah#cite-1",
        "http://foo.bar/?q=Test%20URL-encoded%20stuff",
        "http://xn--nw2a.xn--j6w193g/",
        "http://-.~_!$&'()*+,;=:%40:80%2f::::::@example.com",
        "http://223.255.255.254",
        "ftp://ftp.is.co.za/rfc/rfc1808.txt",
        "ldap://[2001:db8::7]/c=GB?objectClass?one",
        "mailto:John.Doe@example.com",
        "news:comp.infosystems.www.servers.unix",
        "tel:+1-816-555-1212",
        "urn:oasis:names:specification:docbook:dtd:xml:4.1.2",
        "https://@example.org/test.txt",
    ],
    "uri-reference": [
        "http://foo.bar/?baz=qux#quuz",
        "//foo.bar/?baz=qux#quuz",
        "/abc",
        "abc",
        "#fragment",
        "",
        "a/b:c",
    ],
    "uuid": [
        "2EB8AA08-AA98-11EA-B4AA-73B441D16380",
        "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
    ],
}
WRONG = {
    "date": [
        "2021-02-29",
        "1900-02-29",
        "2020-01-32",
        "2020-13-01",
        "2020-04-31",
        "1998-1-20",
        "06/19/1963",
        "0000-01-01",
        "2023-W13-2",
        "২020-01-01",
    ],
    "time": [
        "23:59:60+01:00",
        "22:59:60Z",
        "24:00:00Z",
        "00:60:00Z",
        "00:00:61Z",
        "12:00:00",
        "08:30:06 PST",
        "01:02:03+24:00",
        "01:02:03Z+00:30",
        "1২:00:00Z",
    ],
    "date-time": [
        "1990-02-31T15:59:59.123-08:00",
        "1998-12-31T23:58:60Z",
        "1990-12-31T15:59:59-24:00",
        "2021-02-29T00:00:00Z",
        "1963-06-19T08:30:06.28123+01:00Z",
        "1990-12-31 15:59:59Z",
    ],
    "duration": [
        "PT1D",
        "P",
        "P1YT",
        "PT",
        "P2D1Y",
        "P1D2H",
        "P2S",
        "P1Y2W",
        "1Y",
        "P১Y",
        "PT1H1S",
    ],
    "email": [
        "2962",
        ".test@example.com",
        "test.@example.com",
        "te..st@example.com",
        "joe.bloggs@invalid=domain.com",
        "joe.bloggs@[127.0.0.300]",
        "joe@",
    ],
    "hostname": [
        "-a-host-name-that-starts-with--",
        "not_a_valid_host_name",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.com",
        "hostname-",
        "-hostname",
        "a..b",
        ".a",
        "a.",
        "xn--X",
        "a.XN--aa---o47jg78q",
        ".".join(["a" * 49] * 5) + ".abcd",
        "",
        "a b",
    ],
    "ipv4": [
        "127.0.0.0.1",
        "256.256.256.256",
        "127.0",
        "0x7f000001",
        "087.10.0.1",
        "1.2.3.4\n",
        "192.168.1.0/24",
    ],
    "ipv6": [
        "12345::",
        "1:1:1:1:1:1:1:1:1",
        "1:1:1:1:1:1:1:1:255.255.255.255:1",
        "::laptop",
        "1::d6::42",
        "1:2:3:4:5:6:7",
        "1::1.2.3",
        ":2:3:4:5:6:7:8",
        "1:2:3:4:5:6:7:",
        "1:2:3:4::5:6:7:8",
        "fe80::a%eth1",
        "1:2:3:4:1.2.3",
        "1:2:3:4:5:6:7:8::",
    ],
    "json-pointer": [
        "/foo/bar~",
        "/~0/~",
        "a",
        "#",
        "/~2",
    ],
    "relative-json-pointer": [
        "-1/foo",
        "0##",
        "01/a",
        "01#",
        "",
        "+1/foo",
    ],
    "uri": [
        "//foo.bar/?baz=qux#quuz",
        "/abc",
        "\\\\WINDOWS\\fileshare",
        "abc",
        "http:// shouldfail.com",
        ":// should fail",
        "bar,baz:foo\n",
        "https://[@example.org/test.txt",
        "https://example.org/foobar\\.txt",
        "https://example.org/foobar<>.txt",
        "https://example.org/foobar`.txt",
        "a:%zz",
        "http://a/#a#b",
    ],
    "uri-reference": [
        "\\\\WINDOWS\\fileshare",
        "#frag\\ment",
        "a b",
        "%zz",
    ],
    "uuid": [
        "2eb8aa08aa9811eab4aa73b441d16380",
        "2eb8aa08-aa98-11ea-b4aa-73b441d1638",
        "2eb8aa08-aa98-11ea-b4ga-73b441d16380",
    ],
}


def state_of(name):
    return compiled({"type": "string", "format": name})


def quoted(text):
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_are_taken_and_no_others(name):
    state = state_of(name)
    assert [text for text in RIGHT[name] if not takes(state, quoted(text))] == []
    assert [text for text in WRONG[name] if takes(state, quoted(text))] == []


def test_days_of_leap_years():
    state = state_of("date")
    for year in [*range(1, 30), *range(1890, 1910), *range(1990, 2030), 2100, 2400, 9999]:
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        assert takes(state, f'"{year:04}-02-29"') == is_leap, year


def test_all_days_of_some_years():
    state = state_of("date")
    for year, month, day in ((y, m, d) for y in (1900, 2024) for m in range(14) for d in range(33)):
        try:
            datetime.date(year, month, day)
            is_day = True
        except ValueError:
            is_day = False
        assert takes(state, f'"{year:04}-{month:02}-{day:02}"') == is_day, (year, month, day)


def test_addresses_as_the_standard_library_has_them():
    state, rng = state_of("ipv6"), random.Random(1)
    parts = ["1", "ab", "::", ":", ":", ":", "ffff", "1.2.3.4", "0"]
    for _ in range(1500):
        text = "".join(rng.choices(parts, k=rng.randint(1, 15)))
        try:
            ipaddress.IPv6Address(text)
            is_address = True
        except ValueError:
            is_address = False
        assert takes(state, f'"{text}"') == is_address, text


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "binary",
        "byte",
        "url",
        "color",
        "int32",
        "regex",
        "iri",
        "uri-template",
        "x-own",
    ],
)
def test_another_format_is_an_annotation(name):
    assert takes(compiled({"type": "string", "format": name, "maxLength": 3}), '"a b"')
    assert not takes(compiled({"type": "string", "format": name, "maxLength": 3}), '"abcd"')


@pytest.mark.parametrize("name", ["date", "password", "int64"])
def test_a_format_restricts_texts_alone(name):
    state = compiled({"type": ["integer", "null"], "format": name})
    assert takes(state, "5")
    state = compiled({"format": name})
    assert takes(state, '{"a": [5]}')
    assert takes(state, '"x"') == (name != "date")


def test_a_format_beside_a_pattern_and_a_length():
    state = compiled({"format": "date", "pattern": "^2024", "maxLength": 10.0})
    assert takes(state, '"2024-02-29"')
    assert not takes(state, '"2023-01-01"')
    assert not takes(state, '"2024-02-30"')


@pytest.mark.parametrize("name", sorted({*RIGHT, *WRONG}))
def test_lenient_answers_are_validated_as_strict_ones_are_written(name):
    schema = {"allOf": [{"format": name}], "contains": True}  # as of a lenient request
    strict = compiled({"type": "string", "format": name})
    texts = [*RIGHT.get(name, ()), *WRONG.get(name, ()), "", "x", "é", "1\n"]
    for text in texts:
        flaw = validation_error(schema, json.dumps(text))
        assert (flaw is None) == takes(strict, json.dumps(text, ensure_ascii=False)), text
        assert flaw is None or flaw == f"$: {shown(f'{text!r} is not a {name!r}', 300)}"


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"format": "password"}, '"x"'),
        ({"format": "byte"}, '"x"'),
        ({"format": "idn-email"}, '"x"'),
        ({"format": "date"}, "5"),
        ({"format": "date"}, '["x"]'),
        ({"format": ["date"]}, '"x"'),
    ],
)
def test_an_unknown_format_or_another_type_is_not_validated(schema, answer):
    assert validation_error(schema, answer) is None
