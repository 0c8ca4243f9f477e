"""Executors, hooks and commands with one mistake each fail their rule; correct ones pass."""

from __future__ import annotations

import tempfile

import pytest
from support.broken import commands, executors, hooks
from support.kit_suites import assert_fails, each_broken, label, shorten, suite_tests
from support.searching import kit_examples

from hardpoint.builtin_plugins import commands as builtin
from hardpoint.builtin_plugins.batch_routes import BatchRoutes
from hardpoint.builtin_plugins.commands import chat, config, generate, plugins
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.response_stores import ResponseStores
from hardpoint.testing import CommandSuite, ExecutorSuite, HookSuite

pytest_plugins = ["hardpoint.testing"]

# component, test that it fails, rule, pattern of the message
EXECUTORS = [
    (executors.NoContract, "contract", "contract", "add `contract = 2` to its class body"),
    (executors.Drops, "results", "results", "got 0 tokens, the worker sampled 1"),
    (executors.Doubles, "results", "results", "got 2 tokens, the worker sampled 1"),
    (executors.OffByOne, "results", "results", r"got token \d+; a worker that ran each step once"),
    (executors.RunsTwice, "results", "results", r"got token \d+; a worker that ran each step once"),
    (executors.Late, "results", "results", r"was to sample step \d+ when step \d+ had"),
    (executors.NoFuture, "results", "futures", "execute_model returned ModelRunnerOutput"),
    (executors.IgnoresGrammars, "results", "results", r"got token \d+; a worker that ran each"),
    (executors.NeverEnds, "results", "futures", "of sample_tokens was not done after 0.5 s"),
    (executors.FirstRankOnly, "results", "results", "is not .* rank 1|is None, no Model"),
    (executors.SkipsOthers, "results", "results", r"of rank 1 was .*executor got .'sample"),
    (executors.RefusesInRiddles, "sizes", "sizes", "pipeline = 2 its constructor raised ConfigE"),
    (executors.RefusesAll, "sizes", "sizes", r"it refuses all of .\(1, 1\), \(2, 1\)"),
    (executors.OneInfo, "start", "start", r"returned the infos of ranks \[0\], there are 2"),
    (executors.Backwards, "start", "start", r"returned the infos of ranks \[1, 0\]"),
    (executors.LoadsOneByOne, "start", "start", "rank 0 loads its model, and there is a rank"),
    (executors.LoadsEarly, "start", "start", r"has loaded the models of ranks \[0, 1\]"),
    (executors.WaitsForAll, "start", "errors", "of rank 1 failed; start raised Hard|had"),
    (executors.OutputRankOnly, "reports", "reports", r"has reports of ranks \[0\], each of 2"),
    (executors.NoResults, "calls", "collective_rpc", r"1 workers returned .*_rpc returned \[\]"),
    (executors.CallsTwice, "calls", "collective_rpc", r"returned \['rank 0 at .*, 'rank 0 at"),
    (executors.IgnoresTimeouts, "timeout", "timeout", r"timeout=0.125 returned after \d"),
    (executors.MixesUp, "timeout", "timeout", r"late call: 2 .* returned \[{}, {}\]"),
    (executors.SwallowsErrors, "errors", "errors", "of rank 0 raised ModelError, but execute_m"),
    (executors.OutputRankOnly, "errors", "errors", "sample_tokens of rank 1 raised ModelError"),
    (executors.RenamesErrors, "errors", "errors", "raised RuntimeError: a worker failed"),
    (executors.NeverSleeps, "sleep", "sleep", r"after sleep\(1,\) a worker is not at level 1"),
    (executors.ClaimsTwo, "pipeline", "pipeline", "is 2, but execute_model returned only when its"),
    (executors.ClaimsNone, "pipeline", "pipeline", "max_concurrent_batches is 0"),
    (executors.ReportsClose, "failure", "failure", "close called the callback with RuntimeError"),
    (executors.Silent, "failure", "failure", "idle worker was lost, and the callback was not call"),
    (executors.Repeats, "failure", "failure", "lost, and the callback was called 2 times"),
    (executors.Vague, "failure", "failure", r"'a worker was lost'\), which does not name 'ra"),
    (executors.Forgets, "failure", "failure", r"raised HardpointError\('there are no .*loss was"),
    (executors.GoesOn, "failure", "failure", "rank 1 while others waited, and the cal|had not en"),
    (executors.LeavesWaiting, "failure", "failure", "and rank 0 was not aborted|had not ended"),
    (executors.KeepsWaiting, "failure", "failure", "had not ended after 0.2 s"),
    (executors.LeaksThread, "close", "close", r"there are more threads \(\d+, before \d+\)"),
    (executors.LeaksProcess, "close", "close", r"processes \(\d+, before \d+\)"),
    (executors.LeaksFile, "close", "close", r"there are more open files \(\d+, before \d+\)"),
    (executors.ClosesOnce, "close", "exceptions", "RuntimeError: closed already"),
    (executors.KeepsWorkers, "close", "close", r"workers of ranks \[0\] are not closed"),
    (executors.NeverAborts, "close", "close", r"workers of ranks \[0, 1\] are not closed"),
    (executors.OffByOne, "tokens", "tokens", r"request 'r\d' got \[.*, with uniproc it gets \["),
]  # fmt: skip


HOOKS = [
    (hooks.NoContract, "contract", "contract", "states no contract version"),
    (hooks.UnknownHook, "contract", "contract", "request_ended.*hooks are: engine_started"),
    (hooks.UnknownArgument, "contract", "contract", "result"),
    (hooks.Unmarked, "contract", "contract", "request_finished is not marked with hookimpl"),
    (hooks.Asynchronous, "contract", "contract", "is an `async def`, which is never awaited"),
    (hooks.NeedsTokens, "valid_calls", "valid calls", "request_finished raised IndexError"),
    (hooks.NeedsTags, "valid_calls", "valid calls", "request_received raised KeyError: 'tenant'"),
    (hooks.ChangesRecord, "valid_calls", "reads only", "step_planned tried to change its argum"),
    (hooks.ChangesInfo, "valid_calls", "reads only", "engine_started changed its argument"),
    (hooks.RenamesRequest, "requests", "request", "it changed request_id from '0_r-1' to"),
    (hooks.WrongValue, "requests", "request", "it left an invalid value: params.max_tokens"),
    (hooks.EmptiesPrompt, "requests", "request", "a request without prompt_token_ids"),
    (hooks.Counts, "requests", "completions", "the first got tags {'number': '1'} and the second"),
    (hooks.ClosesWhatIsOpen, "lifecycle", "lifecycle", "AttributeError: .*after started"),
    (hooks.Blocks, "prompt", "prompt", "engine_started had not returned after 0.2 s"),
    (hooks.Slow, "prompt", "prompt", r"step_planned took \d+ microseconds, the budget is 1000"),
    (hooks.NoCommands, "commands", "commands", r"cli_commands returned \['hello'\]"),
    (hooks.Twins, "commands", "commands", "two of its commands have one name"),
    (hooks.ProvidesList, "components", "components", "expected a mapping of names to classes"),
    (hooks.ProvidesUnversioned, "components", "components", "states no contract version"),
    (hooks.ProvidesInTurn, "components", "components", r"it returned .*_0.*, then .*_1"),
    (hooks.adds(3), "server_extensions", "extensions", r"must return a list of Route, .*got \[3\]"),
    (hooks.PlainRoute, "server_extensions", "extensions", "endpoint: expected an `async def`"),
    (hooks.BadPath, "server_extensions", "extensions", "path: expected one that begins with /"),
    (hooks.Calls, "server_extensions", "extensions", "the hook calls engine.generate, which"),
    (hooks.Alternates, "server_extensions", "extensions", r"returned \['Route'\], and then \[\]"),
    (hooks.AsksTwice, "server_extensions", "middleware", "it called the application 2 times"),
    (hooks.Swallows, "server_extensions", "middleware", "for a GET it sent nothing"),
    (hooks.BeginsOnly, "server_extensions", "middleware", "its answer has no end: .'start'"),
    (hooks.StartsAsText, "server_extensions", "middleware", "for a GET: .* the status '200', exp"),
    (hooks.TextHeader, "server_extensions", "middleware", "headers that are no pairs of bytes"),
    (hooks.RefusesByNumber, "server_extensions", "middleware", "headers that are no texts of Lat"),
    (hooks.RouteTextStatus, "server_extensions", "route", "GET /acme/{name}: .* status '200'"),
    (hooks.RouteTextHeaders, "server_extensions", "route", "headers that are no pairs of bytes"),
    (hooks.RouteNumberHeader, "server_extensions", "route", "its GET /acme/{name} raised Attrib"),
    (hooks.RouteUnfinished, "server_extensions", "route", "its GET .* did not finish its answer"),
    (hooks.RouteDict, "server_extensions", "route", "its GET .* returned {}"),
    (hooks.RouteUnencodable, "server_extensions", "route", "its GET .* raised TypeError"),
    (hooks.LosesBody, "server_extensions", "transform", "request returned None, expected a dict"),
    (hooks.Waits, "server_extensions", "transform", "response had not returned after 0.2 s"),
    (hooks.BadEvent, "server_extensions", "transform", "event returned .*, expected a dict or"),
    (hooks.NeedsKey, "server_extensions", "authenticator", "raised KeyError: 'authorization'"),
    (hooks.ReturnsTrue, "server_extensions", "authenticator", "returned True"),
    (hooks.SharesResponses, "server_extensions", "response store", "get by another owner returned"),
    (hooks.KeepsFirstResponse, "server_extensions", "response store", "get of a stored record"),
    (hooks.ReturnsText, "server_extensions", "response store", "get of a stored record returned"),
    (hooks.DeletesNothing, "server_extensions", "response store", "get of a deleted record"),
    (hooks.DeletesQuietly, "server_extensions", "response store", "delete by another owner"),
    (hooks.RaisesForUnknown, "server_extensions", "response store", "raised KeyError"),
]  # fmt: skip

COMMANDS = [
    (commands.CLASHES, "definition", "definition", "there is a built-in command 'generate'"),
    (commands.BAD_NAME, "definition", "definition", "its name is 'say hello'"),
    (commands.NO_HELP, "definition", "definition", "it has no help text: summary is ' '"),
    (commands.LONG_HELP, "definition", "definition", "its summary has several lines"),
    (commands.UNEXPLAINED, "help", "help", "its argument --size has no help text"),
    (commands.CLASHING, "help", "help", "configure raised ArgumentError: .*--model"),
    (commands.BAD_FORMAT, "help", "help", "--help raised (Type|Value)Error: "),
    (commands.EXITS, "run", "run", "`measure` exited by SystemExit: 0"),
    (commands.NOTHING, "run", "run", "`measure` returned None"),
    (commands.FAILS, "run", "run", "`measure` raised ZeroDivisionError"),
    (commands.TABLE, "wrong_arguments", "wrong arguments", "--color=no such value'` raised KeyErr"),
    (commands.RAISES, "wrong_arguments", "wrong arguments", "`measure '--size=-1'` raised KeyErr"),
    (commands.PRINTS, "wrong_arguments", "wrong arguments", "'--size' '9'` printed a traceback"),
    (commands.ACCEPTS, "wrong_arguments", "wrong arguments", "returned 0, as if it were right"),
]  # fmt: skip


class TestUniproc(ExecutorSuite):
    executor = UniprocExecutor
    examples = kit_examples()


class TestThreaded(ExecutorSuite):
    """A thread per rank."""

    executor = executors.Threaded
    examples = kit_examples()

    def lose_worker(self, executor, rank):
        executor.lose(rank)


class Hooks(HookSuite):
    """Measures nothing."""

    budget_us_per_step = budget_us_per_request = None


class TestBuiltinHooks(Hooks):
    hooks = builtin


class TestMemoryOfResponses(Hooks):
    hooks = ResponseStores
    options = {"use": "memory"}


class TestFileOfResponses(Hooks):
    hooks = ResponseStores
    options = {"use": "sqlite", "path": f"{tempfile.mkdtemp()}/responses.db"}


class TestBatchRoutes(Hooks):
    hooks = BatchRoutes
    options = {"folder": tempfile.mkdtemp()}


class TestHooks(Hooks):
    hooks = hooks.Right


class TestRoutes(Hooks):
    """Their answers need a body, or an engine, which the kit has not."""

    hooks = hooks.ReadsAndGenerates


class TestGenerate(CommandSuite):
    command = generate.COMMAND
    arguments = (["say", "--max-tokens", "3"], ["say", "--json", "--n", "2"], ["say", "--chat"])
    wrong = (["say", "--logprobs", "2"], ["-", "-"], [])


class TestChat(CommandSuite):
    command = chat.COMMAND
    arguments = ([], ["--system", "short"], ["--when-full", "drop-oldest"])
    wrong = (["--load", "/no/such/file"], ["--when-full", "never"])


class TestPlugins(CommandSuite):
    command = plugins.COMMAND
    arguments = (["list"], ["show", "min_p", "--json"])
    wrong = (["show"], ["show", "nobody"], ["drop"])


class TestConfig(CommandSuite):
    command = config.COMMAND
    arguments = (["show"], ["show", "--json"], ["schema"])


class TestMeasure(CommandSuite):
    command = commands.RIGHT
    arguments = ([], ["--size", "3"])
    wrong = (["--size", "-3"], ["--size", "x"])


_CLOSE = {"running.executor_suite._CLOSE_SECONDS": 0.1}
_SLOW = {"running.executor_suite._SLOW_SECONDS": 0.5}
LIMITS = {
    executors.NeverEnds: {"running.executor_session.CALL_SECONDS": 0.5},
    executors.LoadsOneByOne: {"running.scripted_worker._WAIT_SECONDS": 1.0},
    executors.WaitsForAll: {"running.executor_session.START_SECONDS": 0.8},
    executors.IgnoresTimeouts: _SLOW,
    executors.ClaimsTwo: _SLOW,
    **dict.fromkeys((executors.LeaksThread, executors.LeaksProcess, executors.LeaksFile), _CLOSE),
    **dict.fromkeys((executors.KeepsWorkers, executors.NeverAborts), _CLOSE),
    hooks.Blocks: {"running.hook_suite._LIMIT_SECONDS": 0.2},
    hooks.Waits: {"running.extension_checks._SECONDS": 0.2},
}
SILENT = (
    *(executors.SwallowsErrors, executors.OutputRankOnly, executors.Silent, executors.GoesOn),
    *(executors.LeavesWaiting, executors.KeepsWaiting),
)
"""Those that never report something; a report of them is waited for."""


@pytest.fixture
def ended():
    yield
    while executors.LeaksProcess.started:
        with executors.LeaksProcess.started.pop() as process:
            process.kill()


@pytest.mark.usefixtures("ended")
@each_broken(EXECUTORS)
def test_a_broken_executor_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, LIMITS.get(cls, {}))
    attributes = {"executor": cls, "failure_seconds": 0.2 if cls in SILENT else 60.0}
    if "lose" in dir(cls):
        attributes["lose_worker"] = lambda _self, executor, rank: executor.lose(rank)
    assert_fails(ExecutorSuite, attributes, test, rule, pattern)


@each_broken(HOOKS)
def test_a_broken_hook_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, LIMITS.get(cls, {}))
    assert_fails(HookSuite, {"hooks": cls}, test, rule, pattern)


@each_broken(COMMANDS)
def test_a_broken_command_fails_its_rule(cls, test, rule, pattern):
    attributes = {
        "command": cls,
        "arguments": ([], ["--size", "3"]),
        "wrong": (["--size", "9"],),
    }
    assert_fails(CommandSuite, attributes, test, rule, pattern)


@pytest.mark.parametrize(
    ("suite", "broken_ones"),
    [(ExecutorSuite, EXECUTORS), (HookSuite, HOOKS), (CommandSuite, COMMANDS)],
    ids=label,
)
def test_every_test_catches_a_component(suite, broken_ones):
    assert {test for _, test, _, _ in broken_ones} == suite_tests(suite)
