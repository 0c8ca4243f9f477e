"""Programs of every sort start an engine process and get their answer. Nothing is asked of them."""

from __future__ import annotations

import json
import os
import sys
import textwrap

import nbclient
import nbformat
import pytest
from support.process.harness import PATH, Program, run_program

ANSWER = " abc abc abc"


def body(scripted, *, plugin: str = "", how: str = "") -> str:
    """Open, generate, print, without a `__main__` guard."""
    extra = f"{{'plugins': {{'enable': [{plugin!r}]}}}}" if plugin else "{}"
    return textwrap.dedent(f"""
        import json
        from support.process.harness import process_config
        from hardpoint import LLM, SamplingParams
        llm = LLM(config=process_config({str(scripted)!r}, {extra}))
        params = SamplingParams(temperature=0.0, max_tokens=20{how})
        print(json.dumps(llm.generate("say abc", params)[0].outputs[0].text))
    """)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", ["file", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("-c", "stdin"))]
)
def test_a_plain_program_without_a_guard(scripted, tmp_path, how):
    """It does not even close; nothing is printed of that."""
    with Program(body(scripted), folder=tmp_path, how=how) as program:
        values, errors = program.finish()
    assert values == [ANSWER]
    assert errors == ""


@pytest.mark.nightly
def test_in_a_thread_next_to_others(scripted, tmp_path):
    source = f"""
        import threading
        values = []
        def work():
            exec({body(scripted)!r}, {{}})
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """
    assert run_program(source, folder=tmp_path, forked=True) == [ANSWER, ANSWER]


def test_in_an_asyncio_program(scripted, tmp_path):
    """Its event loop goes on while the engine is in a step, which waits for that."""
    source = f"""
        import asyncio, json
        from pathlib import Path
        from support.process.harness import process_config
        from support.waiting import HeldSteps
        from hardpoint import AsyncLLM, SamplingParams

        held = HeldSteps(Path({str(tmp_path)!r}))

        async def one(llm, index):
            params = SamplingParams(temperature=0.0, max_tokens=20, plugin_args=held.slow())
            async for output in llm.generate("say abc", params, f"r{{index}}"):
                text = output.outputs[0].text
            return text

        async def main():
            enable = {{"plugins": {{"enable": ["support.plugins.slow:Slow"]}}}}
            llm = AsyncLLM(config=process_config({str(scripted)!r}, enable))
            ticks = 0
            async def tick():
                nonlocal ticks
                while ticks < 10:
                    ticks += held.have_begun()
                    await asyncio.sleep(0.001)
                held.let_go()
            ticker = asyncio.create_task(tick())
            print(json.dumps(await asyncio.gather(*(one(llm, i) for i in range(8)))))
            print(json.dumps(ticks))
            llm.close()

        asyncio.run(main())
    """
    assert run_program(source, folder=tmp_path, forked=True) == [[ANSWER] * 8, 10]


@pytest.mark.nightly
def test_in_a_notebook(scripted, tmp_path, monkeypatch):
    """A kernel; one cell defines a processor, the next uses it, a third closes."""
    known = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATH + known))
    cells = [PROCESSOR, body(scripted, plugin="__main__:Only", how=ONLY), "llm.close()"]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells]
    )
    kernel = kernel_folder(tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(kernel))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="this").execute(cwd=str(tmp_path))
    printed = "".join(
        output.text for output in notebook.cells[1].outputs if output.name == "stdout"
    )
    assert json.loads(printed.strip().splitlines()[-1]) == "A" * 20
    shown = "".join(str(output) for cell in notebook.cells for output in cell.outputs)
    assert "\\x1b" not in shown


def kernel_folder(folder):
    """A kernel that is this very interpreter."""
    specification = folder / "jupyter" / "kernels" / "this"
    specification.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (specification / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "this", "language": "python"})
    )
    return folder / "jupyter"


PROCESSOR = """
    import math
    from typing import Annotated
    from msgspec import Meta
    from hardpoint import plugins
    from hardpoint.plugins import LogitsProcessor, Phase

    class Only(LogitsProcessor):
        contract = 1
        phase = Phase.MASK

        class Arguments(plugins.Arguments):
            token: Annotated[int, Meta(ge=0, lt=257)]

        def apply(self, logits, rows):
            kept = logits.clone().fill_(-math.inf)
            for row, arguments in enumerate(rows.arguments()):
                kept[row, arguments.token] = 0.0
            return kept
"""
ONLY = ", ignore_eos=True, plugin_args={'only': {'token': llm.tokenizer.encode('A')[0]}}"


def test_a_processor_that_the_script_itself_defines(scripted, tmp_path):
    """Its constrained arguments refuse bad values where the engine is, too."""
    source = (
        textwrap.dedent(PROCESSOR)
        + body(scripted, plugin="__main__:Only", how=ONLY)
        + textwrap.dedent("""
        import msgspec
        from support.internals import input_processor_of
        request, _, _ = input_processor_of(llm.llm_engine).process(
            "bad", "say abc", params, __import__("hardpoint.core.frontend.requests.input_processor",
            fromlist=["NO_EXTRAS"]).NO_EXTRAS, arrival_time=0.0
        )
        request.plugin_args["only"] = {"token": 999}  # as a client that checks nothing would
        llm.llm_engine.parts.client.add_request(request)
        (output,) = llm.llm_engine.parts.client.get_output(wait=True).outputs
        print(json.dumps([str(output.finish_reason), output.error]))
        print(json.dumps(llm.generate("say abc", params)[0].outputs[0].text))
        """)
    )
    text, (reason, error), again = run_program(source, folder=tmp_path, forked=True)
    assert text == again == "A" * 20
    assert reason == "error"
    assert error == "plugin_args.only.token: expected a whole number <= 256, got 999"


@pytest.mark.nightly
def test_a_module_next_to_the_script_when_started_from_elsewhere(scripted, tmp_path):
    here, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "own_plugins.py").write_text(textwrap.dedent(PROCESSOR))
    source = body(scripted, plugin="own_plugins:Only", how=ONLY)
    assert run_program(source, folder=here, cwd=elsewhere, forked=True) == ["A" * 20]


@pytest.mark.nightly
def test_a_program_whose_working_directory_is_gone(scripted, tmp_path):
    """The working directory is removed while the program runs, before the engine starts."""
    gone = tmp_path / "gone"
    gone.mkdir()
    source = f"import os, torch; os.rmdir({str(gone)!r})\n" + body(scripted)
    assert run_program(source, folder=tmp_path, cwd=gone, forked=True) == [ANSWER]


def test_in_a_program_that_forks_afterwards(scripted, tmp_path):
    """The child ends without taking the engine from its parent."""
    source = body(scripted) + textwrap.dedent("""
        import os, sys
        sys.stdout.flush()  # else the child has the output, too
        child = os.fork()
        if child == 0:
            del llm
            sys.exit(0)  # with all that is done at exit
        assert os.waitpid(child, 0)[1] == 0
        print(json.dumps(llm.generate("say abc", params)[0].outputs[0].text))
        llm.close()
    """)
    assert run_program(source, folder=tmp_path, forked=True) == [ANSWER, ANSWER]
