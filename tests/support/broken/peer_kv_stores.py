"""KV stores that hand blocks to other engines of this process, with one mistake each."""

from __future__ import annotations

import threading
import time

from hardpoint.plugins.kv_store import PeerKVStore
from support.broken.kv_stores import Right

_engines = {}


class RightPeer(Right, PeerKVStore):
    """Makes no mistake."""

    class Options(Right.Options):
        folder: str = ""
        peer: str = ""

    def __init__(self, context):
        super().__init__(context)
        self.offers = {}
        self.changed = threading.Condition()
        _engines[self.options.folder, context.engine_id] = self

    @property
    def peers(self):
        return frozenset({self.options.peer} - {""})

    def at(self, peer):
        return _engines[self.options.folder, peer]

    def offer(self, key, buffer, seconds):
        self.seconds = seconds  # the same of all
        with self.changed:
            self.offers[key] = (self.end_of(seconds), bytes(buffer.whole))
            self.changed.notify_all()
        return True

    def end_of(self, seconds):
        return time.monotonic() + seconds

    def fetch(self, peer, key, buffer, seconds):
        block = self.at(peer).give_offer(key, seconds)
        if block is None:
            return False
        buffer.whole[:] = block
        return True

    def give_offer(self, key, seconds):
        with self.changed:
            self.changed.wait_for(lambda: key in self.offers, seconds)
            end, block = self.pop_offer(key)
        return block if time.monotonic() < end else None

    def pop_offer(self, key):
        return self.offers.pop(key, (0.0, None))

    def renew(self, keys, peer=None):
        if peer is not None:
            self.at(peer).renew(keys)
            return
        with self.changed:
            for key in set(keys) & set(self.offers):
                self.offers[key] = (self.end_of(self.seconds), self.offers[key][1])

    def close(self):
        _engines.pop((self.options.folder, self.context.engine_id), None)


class NamesItself(RightPeer):
    @property
    def peers(self):
        return frozenset({self.context.engine_id, self.options.peer})


class FetchedTwice(RightPeer):
    def pop_offer(self, key):
        return self.offers.get(key, (0.0, None))


class LooksUpOffers(RightPeer):
    def lookup(self, keys):
        return [key in self.offers or key in self.blocks for key in keys]


class PopsLate(RightPeer):
    def give_offer(self, key, seconds):
        end, block = self.offers.get(key, (0.0, None))
        time.sleep(0.05)
        self.offers.pop(key, None)
        return block if time.monotonic() < end else None


class NeverEnds(RightPeer):
    def end_of(self, seconds):
        return time.monotonic() + 100


class RenewsOwnOnly(RightPeer):
    def renew(self, keys, peer=None):
        if peer is None:
            super().renew(keys)


class RenewsMissing(RightPeer):
    def renew(self, keys, peer=None):
        for key in keys:
            del self.offers[key]


class NeverWaits(RightPeer):
    def give_offer(self, key, seconds):
        return super().give_offer(key, 0)


class WaitsLonger(RightPeer):
    def give_offer(self, key, seconds):
        return super().give_offer(key, seconds + 0.5)
