"""The groups of members of LLM and AsyncLLM, and the old names of these members."""

import asyncio
import pydoc
import re
import warnings
from operator import attrgetter

import pytest
from safetensors.torch import load_file, save_file
from support.adapters import lora, write_adapter, write_model

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams, async_llm
from hardpoint import llm as sync_llm
from hardpoint.configuration.loading import config_from
from hardpoint.old_names.members import ASYNC_NAMES, SYNC_NAMES
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
UNTIL = "; the old name works until hardpoint 0.3"


def generated(llm, **options):
    return list(llm.generate([[5, 6, 7]], GREEDY, **options)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    write_adapter(folder / "adapter", write_model(folder / "model"))
    return folder


@pytest.mark.parametrize("in_process", [True, False], ids=["here", "own process"])
def test_a_program_uses_each_group(folder, tmp_path, in_process):
    config = {
        "adapters": {"max_loras": 1, "max_lora_rank": 4},
        "kv_cache": {"num_blocks": 32},
        "engine": {"in_process": in_process, "profile_dir": str(tmp_path / "profiles")},
    }
    tensors = load_file(folder / "model" / "model.safetensors")
    save_file({name: x * 0.5 for name, x in tensors.items()}, tmp_path / "half.safetensors")
    with LLM(str(folder / "model"), config=config, max_model_len=64) as llm:
        tokens = generated(llm)

        assert "generate" in llm.model.supported_tasks
        assert not llm.model.takes_images
        assert llm.model.default_sampling_params() == SamplingParams()

        added = llm.adapters.add(lora("a", 1, folder / "adapter"))
        assert llm.adapters.list() == [added]
        assert llm.adapters.pin(1)
        assert generated(llm, lora_request=added) != tokens
        assert llm.adapters.remove(1)
        assert llm.adapters.resolve("a") is None

        llm.engines.pause("keep" if in_process else "wait")
        assert llm.engines.is_paused()
        llm.engines.resume()
        assert (len(llm.engines), llm.engines[0].rank, llm.engines[-1].rank) == (1, 0, 0)
        assert [engine.is_paused() for engine in llm.engines] == [False]
        llm.engines.set_config({"scheduler.max_waiting": 7})
        assert llm.engines.settings().values["scheduler.max_waiting"].value == 7
        assert llm.engines.scheduler_stats().num_running == llm.engines.load().in_flight == 0
        assert llm.engines.release_session("no such session") == "missing"

        llm.plugins.disable("penalties")
        assert "penalties" not in llm.plugins.meters()
        llm.plugins.enable("penalties")
        assert "penalties" in {entry.name for entry in llm.plugins.manifest.entries}
        llm.plugins.set_policy("priority")
        assert llm.plugins.health().ok
        with pytest.raises(RequestError, match="part: "):
            llm.plugins.call_part("no such part", "describe")

        llm.debug.start_profile()
        assert llm.debug.trace([5, 6, 7], GREEDY).completions[0].token_ids == tokens
        assert len(llm.debug.stop_profile()) == 1

        assert llm.weights.version == "0"
        assert llm.weights.update(tmp_path / "half.safetensors") == llm.weights.version == "1"
        assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].weight_runs


async def test_a_program_with_an_event_loop_uses_each_group(scripted):
    async with AsyncLLM(config=scripted_config(scripted)) as llm:
        ids = await llm.model.tokenize("say abc")
        assert await llm.model.prompt_tokens({"prompt": "say abc"}) == ids
        assert await llm.adapters.list() == []
        await llm.engines.pause("keep")
        assert await llm.engines.is_paused()
        await llm.engines.resume()
        assert not await llm.engines.is_sleeping()
        assert llm.engines.pid == llm.engines[0].pid
        await llm.plugins.disable("penalties")
        assert "penalties" not in await llm.plugins.meters()
        assert (await llm.plugins.enable("penalties")).generation == 3
        assert (await llm.plugins.health()).ok
        trace = await llm.debug.trace("say abc", GREEDY)
        assert trace.completions[0].text == " ab"
        assert llm.weights.version == "0"


@pytest.mark.parametrize("owner", [LLM, AsyncLLM])
def test_help_begins_with_a_table_of_all_members(owner):
    members = {name for name in dir(owner) if not name.startswith("_")}
    assert len(members) <= 25
    text = pydoc.plain(pydoc.render_doc(owner))
    names = {
        name
        for row in re.findall(r"^ \|  \| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert names == members
    assert text.index("| Member | Use |") < text.index("Methods defined here")


@pytest.mark.parametrize(("owner", "names"), [(LLM, SYNC_NAMES), (AsyncLLM, ASYNC_NAMES)])
def test_old_names_are_not_shown(owner, names):
    assert not names.keys() & set(dir(owner))
    text = pydoc.plain(pydoc.render_doc(owner))
    assert not [name for name in [*names, "from_resolved"] if f"|  {name}(" in text]


def check_old_names(llm, owner, names):
    """Read each old name twice at one place; compare it with the new one."""
    for name, new in names.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                old = getattr(llm, name)
        assert [str(warning.message) for warning in caught] == [
            f"{owner}.{name} is now {'' if new[0].isupper() else owner + '.'}{new}{UNTIL}"
        ]
        assert (caught[0].category, caught[0].filename) == (DeprecationWarning, __file__)
        if new != "OutputStream.fork":
            assert old == attrgetter(new)(llm)


def test_each_old_name_warns_once_with_the_new_one(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        check_old_names(llm, "LLM", SYNC_NAMES)
        assert not hasattr(llm, "no_such_name")

    async def main():
        async with AsyncLLM(config=scripted_config(scripted)) as llm:
            check_old_names(llm, "AsyncLLM", ASYNC_NAMES)
            assert not hasattr(llm, "no_such_name")

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*works until hardpoint 0.3:DeprecationWarning")
def test_a_program_with_old_names_gets_the_same_results(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        params = llm.default_sampling_params()
        assert params == llm.model.default_sampling_params()
        stream = llm.stream("say abc", GREEDY)
        tokens = [token for output in stream for token in output.outputs[0].token_ids]
        (last,) = llm.fork(stream, tokens[:2])
        assert [*tokens[:2], *last.outputs[0].token_ids] == tokens
        with pytest.raises(RequestError, match="stream: expected the result of `stream`, got str"):
            llm.fork("0", [])
        llm.set_policy("priority")
        llm.set_plugins(disable=["penalties"])
        assert llm.manifest.generation == 3
        assert llm.trace("say abc", GREEDY).completions[0].token_ids == tokens
        llm.pause("keep")
        assert llm.is_paused()
        llm.resume()
        assert llm.health().ok


@pytest.mark.parametrize(("owner", "module"), [(LLM, sync_llm), (AsyncLLM, async_llm)])
def test_the_old_name_of_a_class_method_warns_too(scripted, owner, module):
    new = f"{owner.__name__}.from_resolved is now {module.__name__}.open_resolved{UNTIL}"

    class Derived(owner):
        pass

    given = config_from(scripted_config(scripted), {}, caller=owner.__name__)
    with pytest.warns(DeprecationWarning, match=re.escape(new)) as caught:
        opened = Derived.from_resolved(*given)
    opened.close()
    assert (len(caught), caught[0].filename, type(opened)) == (1, __file__, Derived)
    assert not hasattr(owner, "no_such_name")
