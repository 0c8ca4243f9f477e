"""thinking_budget through the engine, with the reasoning parser's markers."""

from __future__ import annotations

import pytest
from support.driving import alone, run

from hardpoint import RequestError, SamplingParams
from hardpoint.testing import scripted_engine, write_scripted_model


class TestInTheEngine:
    """With a byte-level tokenizer, so that each marker is seven or eight tokens."""

    @pytest.fixture
    def engine(self, tmp_path):
        folder = write_scripted_model(
            tmp_path / "model",
            {
                "why": "\n <think>" + "a" * 40 + "</think>because",
                "quick": "<think>aaa</think>because",
                "why<think>": "b" * 40,
            },
        )
        opened = []

        def open_it(**extra):
            extra = {"reasoning": {"parser": "think_tags"}} | extra
            opened.append(scripted_engine(folder, extra))
            return opened[-1]

        yield open_it
        for engine in opened:
            engine.close()

    def texts(self, engine, prompt, **fields):
        params = SamplingParams(**({"max_tokens": 40, "temperature": 0.0} | fields))
        return [completion[2] for completion in run(engine, [("r", prompt, params)])["r"][0]]

    @pytest.mark.parametrize("budget", [0, 1, 5, 20])
    def test_thinking_ends_when_the_budget_is_used_up(self, engine, budget):
        (text,) = self.texts(engine(), "why", thinking_token_budget=budget)
        assert text.startswith("\n <think>" + "a" * budget + "</think>")
        assert not text.startswith("\n <think>" + "a" * budget + "</think>because")

    def test_a_budget_that_is_large_enough_changes_nothing(self, engine):
        it = engine()
        assert self.texts(it, "quick", thinking_token_budget=3) == ["<think>aaa</think>because"]
        whole = "\n <think>" + "a" * 40 + "</think>because"
        assert self.texts(it, "why", thinking_token_budget=40, max_tokens=99) == [whole]

    def test_a_forced_marker_that_is_a_stop_token_keeps_min_tokens(self, engine):
        it = engine()
        start, end = (
            it.parts.tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "!")
        )
        budget = {"start": start, "end": end, "thinking_token_budget": 2}
        fields = {"plugin_args": {"thinking_budget": budget}, "stop_token_ids": end}
        assert self.texts(it, "why<think>", **fields) == ["bb"]
        (text,) = self.texts(it, "why<think>", **fields, min_tokens=12, ignore_eos=True)
        assert text.startswith("bb!")
        assert len(text) >= 12

    def test_thinking_that_the_prompt_began(self, engine):
        (text,) = self.texts(engine(), "why<think>", thinking_token_budget=2)
        assert text.startswith("bb</think>")
        (text,) = self.texts(engine(), "why<think>four", thinking_token_budget=4)
        assert text.startswith("</think>")

    def test_random_and_truncated_requests_are_forced_too(self, engine):
        for fields in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {}):
            fields |= {"temperature": 1.0, "seed": 3, "n": 2}
            for text in self.texts(engine(), "why", thinking_token_budget=5, **fields):
                assert text.startswith("\n <think>aaaaa</think>")

    def test_without_a_parser_the_request_is_refused_and_others_go_on(self, engine):
        it = engine(reasoning={})
        with pytest.raises(RequestError, match=r"thinking_token_budget: .* set reasoning\.parser"):
            it.add_request("r", "why", SamplingParams(thinking_token_budget=5))
        assert self.texts(it, "quick") == ["<think>aaa</think>because"]

    def test_the_same_alone_in_company_in_chunks_and_preempted(self, engine):
        jobs = [
            (
                f"r{index}",
                ["why", "quick", "why<think>", "<think>"][index % 4],
                SamplingParams(
                    temperature=float(index % 2),
                    seed=index,
                    max_tokens=30,
                    ignore_eos=True,
                    thinking_token_budget=[None, 0, 3, 9][index // 4],
                ),
            )
            for index in range(16)
        ]
        expected = alone(engine(), jobs)
        small = {"block_size": 4, "memory_bytes": 4 * 8 * 24}
        for extra in (
            {},
            {"scheduler": {"max_num_batched_tokens": 5}},
            {"kv_cache": small, "max_model_len": 64},
        ):
            it = engine(**extra)
            assert run(it, jobs) == expected
            assert run(it, jobs, per_step=2) == expected
