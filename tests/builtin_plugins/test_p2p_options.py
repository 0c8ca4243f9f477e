"""Peers that may ask an engine for blocks, and addresses: rejected ones, and keys over TCP."""

from __future__ import annotations

import fcntl
import os
import socket
import stat

import pytest
import zmq
from support.builtins.peers import BLOCK, PATIENT, Peers, block, holds, key, peer_context

from hardpoint.builtin_plugins.kv_stores import p2p_addresses
from hardpoint.builtin_plugins.kv_stores.p2p import PeerToPeerStore
from hardpoint.plugins import ConfigError

SECRET = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"
PUBLIC = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def refused(name="a", *, world_size=1, **options):
    with pytest.raises(ConfigError) as error:
        PeerToPeerStore(peer_context(name, options, world_size=world_size))
    return str(error.value)


def key_file(folder, content=SECRET, mode=0o600, name="key"):
    file = folder / name
    file.write_text(content)
    file.chmod(mode)
    return str(file)


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            *("", "x", "ipc://", "ipc://relative/x.sock", "ipc://@abstract", "inproc://x"),
            *("tcp://:1", "tcp://host", "tcp://host:port", "tcp://host:*", "udp://h:1"),
        ],
    )
    def test_others_are_refused(self, address):
        assert refused(listen=address) == (
            f"plugin.p2p.listen: expected ipc:///PATH, an absolute one, or tcp://HOST:PORT, got "
            f"{address!r}"
        )

    @pytest.mark.parametrize("port", ["0", "65536"])
    def test_ports_have_bounds(self, port):
        message = refused(listen=f"tcp://127.0.0.1:{port}")
        assert message.startswith("plugin.p2p.listen: expected a port from 1 to 65535, got 'tcp:")

    def test_a_path_is_short_enough_for_a_socket(self, tmp_path):
        message = refused(listen=f"ipc://{tmp_path}/{'x' * 107}")
        assert message.startswith("plugin.p2p.listen: expected a path of at most 107 bytes")

    def test_each_rank_has_its_own(self, tmp_path):
        message = refused(listen=f"ipc://{tmp_path}/x.sock", world_size=2)
        start = "plugin.p2p.listen: expected {rank} in it, because this engine has 2"
        assert message.startswith(start)
        message = refused(
            listen=f"ipc://{tmp_path}/d/{{rank}}", peers={"b": f"ipc://{tmp_path}/b"}, world_size=2
        )
        assert message.startswith("plugin.p2p.peers.b: expected {rank} in it")

    def test_ranks_meet_their_like(self, tmp_path):
        stores = {}
        for name in "ab":
            for rank in range(2):
                options = {
                    "listen": f"ipc://{tmp_path}/s/{name}{{rank}}",
                    "peers": {name: f"ipc://{tmp_path}/s/{name}{{rank}}" for name in "ab"},
                    **PATIENT,
                }
                context = peer_context(name, options, world_size=2, rank=rank)
                stores[name, rank] = PeerToPeerStore(context)
        stores["a", 1].store(key(1), block(1))
        assert stores["b", 1].lookup([key(1)]) == [True]
        assert stores["b", 0].lookup([key(1)]) == [False]
        for store in stores.values():
            store.close()

    @pytest.mark.parametrize("name", ["", "with space", "a/b", "x" * 65])
    def test_ids_of_peers_are_names(self, name):
        message = refused(listen="ipc:///x", peers={name: "ipc:///y"})
        assert message.startswith("plugin.p2p.peers")


class TestSize:
    def test_a_block_fits(self, tmp_path):
        message = refused(listen=f"ipc://{tmp_path}/s/x", size_bytes=BLOCK - 1)
        assert message == (
            f"plugin.p2p.size_bytes: expected at least {BLOCK}, the size of a block, got "
            f"{BLOCK - 1}"
        )

    def test_there_is_so_much_memory(self, tmp_path):
        options = {"listen": f"ipc://{tmp_path}/s/x", "size_bytes": 10**6}
        with pytest.raises(ConfigError) as error:
            PeerToPeerStore(peer_context("a", options, host_memory=10**6 - 1))
        assert str(error.value).startswith(
            "plugin.p2p.size_bytes: 1000000 bytes are more host memory than a rank's process may "
            "still allocate, 999999 bytes"
        )


class TestSocketFolder:
    def test_it_is_made_for_this_user_alone(self, tmp_path):
        peers = Peers(tmp_path)
        peers.open("a")
        folder = tmp_path / "sockets"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "a.sock").lstat().st_mode) == 0o600
        peers.close_all()

    @pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
    def test_one_that_others_enter_is_refused(self, tmp_path, mode):
        (tmp_path / "s").mkdir()
        (tmp_path / "s").chmod(mode)
        message = refused(listen=f"ipc://{tmp_path}/s/x")
        assert message.startswith("plugin.p2p.listen: expected a folder that only this user")
        assert f"with mode {mode:o}" in message

    def test_a_link_is_refused(self, tmp_path):
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        message = refused(listen=f"ipc://{tmp_path}/link/x")
        assert message.startswith("plugin.p2p.listen: expected a folder, not a link, at ")

    def test_one_that_cannot_be_made_is_named(self, tmp_path):
        message = refused(listen=f"ipc://{tmp_path}/no/such/x")
        assert message.endswith("no/such': No such file or directory")

    def test_no_file_is_replaced(self, tmp_path):
        (tmp_path / "s").mkdir(mode=0o700)
        (tmp_path / "s" / "x").write_text("precious")
        assert refused(listen=f"ipc://{tmp_path}/s/x").endswith("exists and is no socket")
        assert (tmp_path / "s" / "x").read_text() == "precious"

    def test_no_running_engine_loses_its_socket(self, tmp_path):
        peers = Peers(tmp_path)
        peers.open("a")
        message = refused(listen=peers.address("a"))
        assert message == (f"plugin.p2p.listen: another process listens at {peers.address('a')!r}")
        peers.close_all()

    def test_the_socket_of_one_that_was_killed_is_replaced(self, tmp_path):
        peers = Peers(tmp_path)
        (tmp_path / "sockets").mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(peers.address("a").removeprefix("ipc://"))
        a, b = peers.open("a"), peers.open("b")
        a.store(key(1), block(1))
        assert b.lookup([key(1)]) == [True]
        peers.close_all()

    def test_something_else_in_the_place_of_a_peer_is_a_fault(self, tmp_path):
        peers = Peers(tmp_path)
        b = peers.open("b")
        (tmp_path / "sockets" / "a.sock").write_text("")
        assert b.lookup([key(1)]) == [False]
        assert peers.faults == [f"peer 'a': {peers.address('a')!r} is no socket of this user"]
        peers.close_all()

    def test_a_peer_whose_folder_others_enter_is_a_fault_and_not_asked(self, tmp_path):
        peers = Peers(tmp_path)
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o755)
        address = f"ipc://{tmp_path}/open/a.sock"
        b = peers.open("b", peers={"a": address}, retry_seconds=0.01)
        polls = []
        with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
            for _ in range(2):  # before somebody listens, and after
                assert b.lookup([key(1)]) == [False]
                assert not b.fetch("a", key(1), block(), 0.2)
                b.renew([key(1)], "a")
                if not polls:
                    impostor.bind(address)
                polls.append(impostor.poll(100))
        assert polls == [0, 0]
        assert peers.faults == [
            f"peer 'a': {address!r}: expected a folder that only this user can enter (chmod 700), "
            f"got {str(tmp_path / 'open')!r} with mode 755 of user {os.geteuid()}"
        ]
        peers.close_all()

    def test_two_stores_cannot_listen_at_one_address(self, tmp_path):
        peers = Peers(tmp_path)
        peers.open("a")
        file = tmp_path / "sockets" / "a.sock"
        file.rename(file.with_name("elsewhere"))  # as if it were not there yet
        assert "another process listens" in refused(listen=peers.address("a"))
        peers.close_all()
        peers.open("a")
        peers.close_all()

    def test_a_lock_that_is_removed_just_then_is_taken_again(self, tmp_path, monkeypatch):
        peers, flock, left = Peers(tmp_path), fcntl.flock, [2]

        def remove_it(descriptor, operation):
            if left[0]:
                left[0] -= 1
                (tmp_path / "sockets" / "a.sock.lock").unlink()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", remove_it)
        peers.open("a")
        assert not left[0]
        assert "another process listens" in refused(listen=peers.address("a"))
        peers.close_all()


class TestKeys:
    def tcp(self, tmp_path, **options):
        peers, keys = {"b": "tcp://127.0.0.1:9"}, {"b": PUBLIC}
        settings = {"listen": "tcp://127.0.0.1:9", "peers": peers, "public_keys": keys}
        default = key_file(tmp_path, name="default")
        return refused(**{**settings, "secret_key_file": default, **options})

    def test_tcp_needs_keys_also_on_this_machine(self, tmp_path):
        assert self.tcp(tmp_path, secret_key_file=None) == (
            "plugin.p2p.secret_key_file: expected a file, got none. tcp://127.0.0.1:9 has no other "
            "protection; use ipc:///PATH to listen without keys"
        )
        message = self.tcp(tmp_path, public_keys={"c": PUBLIC})
        assert message == "plugin.p2p.public_keys: expected one of 'b', at tcp://127.0.0.1:9"
        message = self.tcp(tmp_path, public_keys={}, peers={})
        assert message.startswith(
            "plugin.p2p.public_keys: expected the keys of peers that may connect to tcp:"
        )

    @pytest.mark.parametrize("public", ["", "short", PUBLIC[:-1], "~" * 40, PUBLIC + "x", "ä" * 40])
    def test_a_public_key_is_one(self, tmp_path, public):
        message = self.tcp(tmp_path, public_keys={"b": public})
        assert message.startswith("plugin.p2p.public_keys.b: expected a public key of 40 charac")

    @pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
    def test_a_secret_that_others_read_is_refused(self, tmp_path, mode):
        message = self.tcp(tmp_path, secret_key_file=key_file(tmp_path, mode=mode))
        assert message == (
            f"plugin.p2p.secret_key_file: {str(tmp_path / 'key')!r}: expected a file of yours or "
            f"root's with mode 0600 or 0640, got mode {mode:04o} of user {os.geteuid()}"
        )

    @pytest.mark.parametrize("content", ["", "short", "~" * 40, SECRET + "more"])
    def test_a_file_without_a_key_is_refused_and_not_shown(self, tmp_path, content):
        message = self.tcp(tmp_path, secret_key_file=key_file(tmp_path, content))
        assert message.startswith("plugin.p2p.secret_key_file: expected a secret key of 40")
        assert not content or content not in message

    def test_no_pipes_or_folders_are_read(self, tmp_path):
        os.mkfifo(tmp_path / "pipe", 0o600)
        for name, reason in (
            ("pipe", "expected a regular file"),
            ("", "expected a regular file"),
            ("none", "No such file or directory"),
        ):
            message = self.tcp(tmp_path, secret_key_file=str(tmp_path / name))
            assert message.startswith("plugin.p2p.secret_key_file: ")
            assert message.endswith(reason)

    def test_mounted_secrets_are_read(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "link").symlink_to(key_file(tmp_path, mode=0o640))
        for name in (str(tmp_path / "link"), "~/key"):
            options = {"listen": f"ipc://{tmp_path}/s/x", "secret_key_file": name}
            PeerToPeerStore(peer_context("a", options)).close()

    def test_others_files_are_refused_and_roots_read(self, tmp_path, monkeypatch):
        file, fstat, other = key_file(tmp_path), os.fstat, os.geteuid() + 1

        def owned_by(user):
            def changed(descriptor):
                status = fstat(descriptor)
                return os.stat_result((*status[:4], user, *status[5:10]))

            monkeypatch.setattr(os, "fstat", changed)

        owned_by(other)
        with pytest.raises(ConfigError, match=f"of user {other}$"):
            p2p_addresses.read_key_pair(file, "plugin.p2p.secret_key_file")
        owned_by(0)
        assert p2p_addresses.read_key_pair(file, "x").secret == SECRET.encode()

    def test_no_message_has_the_secret(self, tmp_path):
        context = peer_context("a", {"listen": "ipc:///x", "secret_key_file": key_file(tmp_path)})
        assert SECRET not in repr(context)


@pytest.fixture
def tcp(tmp_path, free_port):
    """Three engines with keys; a and b know each other."""
    pairs = {name: zmq.curve_keypair() for name in "abc"}
    opened, ports = [], {}

    def open_store(name, secret_of=None, host="127.0.0.1", **options):
        if not ports:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            ports.update({peer: free_port(family, host.strip("[]")) for peer in "abc"})
        file = key_file(tmp_path, pairs[secret_of or name][1].decode(), name=f"key-{name}")
        options = {
            "listen": f"tcp://{host}:{ports[name]}",
            "peers": {peer: f"tcp://{host}:{ports[peer]}" for peer in "ab" if peer != name},
            "public_keys": {peer: pairs[peer][0].decode() for peer in "ab"},
            "secret_key_file": file,
            **PATIENT,
            **options,
        }
        opened.append(PeerToPeerStore(peer_context(name, options)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


class TestOverTcp:
    def test_those_who_know_each_other_exchange_blocks(self, tcp):
        a, b = tcp("a"), tcp("b")
        a.store(key(1), block(4))
        assert b.lookup([key(1)]) == [True]
        a.offer(key(2), block(5), 60.0)
        buffer = block()
        assert b.fetch("a", key(2), buffer, 60.0)
        assert holds(buffer, 5)

    @pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
    def test_ipv6(self, tcp):
        a, b = tcp("a", host="[::1]"), tcp("b", host="[::1]")
        a.store(key(1), block(4))
        assert b.lookup([key(1)]) == [True]

    def test_a_key_that_is_not_known_gets_nothing(self, tcp):
        a, c = tcp("a"), tcp("c", connect_seconds=0.4)
        a.store(key(1), block(4))
        a.offer(key(2), block(4), 60.0)
        assert c.lookup([key(1)]) == [False]
        assert not c.fetch("a", key(2), block(), 0.4)

    def test_a_listener_in_the_place_of_a_peer_receives_nothing(self, tcp):
        impostor, b = tcp("a", secret_of="c"), tcp("b", connect_seconds=0.4)
        impostor.store(key(1), block(4))
        assert b.lookup([key(1)]) == [False]

    def test_without_keys_there_is_no_connection(self, tcp):
        a = tcp("a")
        a.store(key(1), block(4))
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger, plain.immediate = 0, True
            plain.connect(a.options.listen)
            assert not plain.poll(300, zmq.POLLOUT)

    def test_a_port_that_is_taken_is_refused(self, tcp):
        a = tcp("a", connect_seconds=0.4)
        with pytest.raises(ConfigError, match=r"\.listen: cannot listen at 'tcp:.*in use"):
            tcp("a")
        assert a.lookup([key(1)]) == [False]


def test_an_engine_of_several_has_an_address_of_its_own():
    address = "ipc:///tmp/kv/{engine_id}-{rank}"
    addresses = [
        p2p_addresses.address_of_rank(address, "plugin.p2p.listen", rank, 2, engine_id)
        for engine_id in ("a", "a-1")
        for rank in (0, 1)
    ]
    assert addresses == [f"ipc:///tmp/kv/{name}" for name in ("a-0", "a-1", "a-1-0", "a-1-1")]
    with pytest.raises(ConfigError, match="^kv_connector.engine_id: expected one, for .engine_id"):
        p2p_addresses.address_of_rank(address, "plugin.p2p.listen", 0, 1)
