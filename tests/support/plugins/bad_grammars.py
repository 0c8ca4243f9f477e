"""A grammar backend that fails in every way, as the request's regular expression asks."""

from __future__ import annotations

import threading

import numpy as np

from hardpoint import plugins
from hardpoint.plugins import Edits, GrammarBackend, Op, Phase, SparseLogitsProcessor

A, B = 64, 65
"""The tokens of "a" and "b" of the scripted model."""

HELD = threading.Event()
"""What compilations named "hang ..." wait for."""


class BadGrammars(GrammarBackend):
    """Allows "a" and "b" without end; the mistake begins with the second token."""

    contract = 1
    formats = ("regex", "choice")

    def compile(self, structured):
        how = structured.regex
        if how.startswith("hang"):
            HELD.wait(60)
        if how == "compile":
            raise KeyError("broken compile")
        if how == "exit":
            raise SystemExit("broken compile")
        if how == "refuse":
            raise ValueError("not this one")
        return None if how == "none" else State(how, 0)


class State:
    def __init__(self, how, count):
        self.how, self.count = how, count

    def fill_bitmask(self, row):
        if self.how == "first mask":
            raise KeyError("broken mask")
        if self.count:
            if self.how == "mask":
                raise KeyError("broken mask")
            if self.how == "empty":
                return False
            if self.how == "outside alone":
                row.view(np.uint32)[-1] = 0xFFFF0000
                return False
            if self.how == "beyond":
                row[len(row)] = 1
        if self.how == "outside":
            row.view(np.uint32)[-1] = 0xFFFF0000
        row.view(np.uint32)[A // 32] |= 3
        return False

    def advance(self, token_id):
        if self.how == "advance":
            raise KeyError("broken advance")
        if self.how == "refuses":
            return False
        self.count += 1
        return token_id in (A, B)

    def rollback(self, count):
        self.count -= count

    def fork(self):
        if self.how == "fork":
            raise KeyError("broken fork")
        return State(self.how, self.count)


class Stuck(GrammarBackend):
    """Allows the tokens 0 to 31; cannot go on after one of them: `regex` is how and which."""

    contract = 1
    formats = ("regex",)

    def compile(self, structured):
        how, token = structured.regex.split()
        return StuckState(how, int(token), [])


class StuckState:
    def __init__(self, how, stuck, tokens):
        self.how, self.stuck, self.tokens = how, stuck, tokens

    def fill_bitmask(self, row):
        if self.stuck not in self.tokens:
            row[0] = -1
        elif self.how == "mask":
            raise KeyError("broken mask")
        return False

    def advance(self, token_id):
        if self.how == "advance" and token_id == self.stuck:
            raise KeyError("broken advance")
        if token_id >= 32 or self.stuck in self.tokens:
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, count):
        del self.tokens[-count:]

    def fork(self):
        return StuckState(self.how, self.stuck, self.tokens[:])


class Forces(SparseLogitsProcessor):
    """Forces the token "z" as the third one."""

    contract = 1
    phase = Phase.FORCE

    class Arguments(plugins.Arguments):
        pass

    def edits(self, rows):
        forced = [row for row, r in enumerate(rows.requests) if len(r.output_token_ids) == 2]
        return Edits(forced, [89] * len(forced), [1e30] * len(forced), Op.SET)
