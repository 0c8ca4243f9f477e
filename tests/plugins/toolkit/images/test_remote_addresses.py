"""Which addresses are public, and which forms of hosts are taken for one."""

import pytest

from hardpoint.toolkit.images.addresses import is_public, is_unusual_host

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "223.255.255.254", "2606:4700::1111", "2a00::1"]

FORGED = [
    # Nobody's, this host's, this network's
    "0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.255.254", "::", "::1",
    # private, behind a provider's NAT, of the link, where clouds have their metadata
    "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255",
    "169.254.169.254", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254",
    # documentation, benchmarks, reserved, multicast, broadcast
    "192.0.0.170", "192.0.2.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.9",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "ff02::1", "2001:db8::1",
    "3fff::1", "100::1", "5f00::1",
    # IPv6 that holds IPv4: mapped, compatible, NAT64, 6to4, Teredo, ISATAP
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:7f00:1", "::127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::808:808", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2606:4700::5efe:a00:1", "2606:4700::200:5efe:a00:1",
    "192.88.99.1", "2001:2::1", "2001:10::1", "2001:20::1",
    # no addresses, or in forms that only some programs take
    "", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "8.8.8", "8.8.8.8 ",
    "8.8.8.08", "[::1]", "1.2.3.4.5", "²", "8.8.8.8/32",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize("address", FORGED)
def test_all_others_are_not(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.01", "1.2.3.4.5", "0x",
     "256.1.1.1", "example.0x7f", "a.1", "127.0.0.1."],
)  # fmt: skip
def test_numbers_that_systems_take_for_addresses(host):
    assert is_unusual_host(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "8.8.8.8", "example.com", "a1.b2", "1and1.com", "x"])
def test_usual_hosts(host):
    assert not is_unusual_host(host)
