"""An engine core with real workers and a scripted KV connector, driven step by step."""

from __future__ import annotations

import pytest

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import EngineCoreRequest, WaitingFor
from hardpoint.testing import scripted_engine
from support.internals import core_of, scheduler_of

from .scripted_connector import use

SMALL = {
    "max_model_len": 128,
    "kv_cache": {"block_size": 4, "num_blocks": 64},
    "scheduler": {"max_num_seqs": 1},
}
PROMPT = tuple(range(30, 50))
OTHER = (1, 2, 3, 4, 5, 6, 7, 8, 9)


class Driver:
    """An engine core with real workers and steps that may fail."""

    def __init__(self, scripted, script=None, clock=None, kv_cache=(), **connector):
        table = {"kv_cache": {**SMALL["kv_cache"], **dict(kv_cache)}}
        if script is not None:
            use(script)
            uses = "support.core.scripted_connector:ScriptedConnector"
            table["kv_connector"] = {"use": uses, **connector}
        self.script = script
        self.engine = scripted_engine(scripted, {**SMALL, **table}, clock=clock)
        self.core, self.scheduler = core_of(self.engine), scheduler_of(self.engine)
        self.tokens = {}
        self.ends = {}
        self.cached = {}

    def add(self, name, prompt=PROMPT, max_tokens=6, **fields):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.tokens[name] = []
        self.core.add_request(
            EngineCoreRequest(
                request_id=name, prompt_token_ids=list(prompt), params=params, **fields
            )
        )

    def step(self):
        outputs, _ = self.core.step()
        self.take(outputs)

    def take(self, by_client):
        for outputs in by_client.values():
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.cached[output.request_id] = output.prefill_stats
                if output.finished:
                    self.ends[output.request_id] = (str(output.finish_reason), output.error)

    def run(self, most=300):
        for _ in range(most):
            if not self.core.has_requests():
                return
            self.step()
        raise AssertionError("it does not end")

    def until(self, condition, most=100):
        for _ in range(most):
            if condition():
                return
            self.step()
        raise AssertionError("it did not come to that")

    def status(self, name="v"):
        live = self.scheduler.live_request(name)
        return None if live is None else live.status

    def is_loading(self, name="v"):
        reason = self.scheduler.why_waiting(name)
        return reason is not None and reason.waiting_for is WaitingFor.REMOTE_KV

    @property
    def num_held(self):
        cache = self.scheduler.context.kv_cache
        return cache.num_usable_blocks - cache.num_free_blocks

    def lose(self, method, *, before):
        """Let the next call of a method of the executor or scheduler fail."""
        owner = DefaultScheduler if method == "update" else UniprocExecutor
        original = getattr(owner, method)

        def fail(component, *args):
            patch.undo()
            if not before:
                result = original(component, *args)
                if owner is DefaultScheduler:  # else the client would not get them
                    self.take(result)
            raise ValueError("the step is lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, fail)
            with pytest.raises(ValueError, match="the step is lost"):
                self.step()

    @property
    def faults(self):
        """Messages of the faults so far, by plugin."""
        fallbacks = self.core.plugin_report().health.fallbacks
        return {name: fault.message for name, fault in fallbacks.items()}
