"""The rules for executors."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

START = Rule(
    "start: it opens a worker per rank, loads all models side by side, and returns their infos",
    "open the workers of launch(0) to launch(world_size - 1), call load_model on all of them at "
    "the same time, and return the list of their results, in rank order",
)
RESULTS = Rule(
    "results: each step is run once in every rank, in order; its result is the output rank's own",
    "pass each plan to all ranks, one after the other, and return the result of the worker of "
    "parallel.output_rank returns, unchanged",
)
REPORTS = Rule(
    "reports: with context.all_report, a result has the report of each rank",
    "wait for the results of all ranks and join them by join_outputs, as first_error_or does",
)
FUTURES = Rule(
    "futures: every call returns a future, which ends",
    "return a concurrent.futures.Future, and set its result or its exception in every case",
)
SIZES = Rule(
    "sizes: it runs as many ranks as `parallel` asks for, or refuses them",
    "let the constructor raise a ConfigError that names `parallel` and a valid value",
)
CALLS = Rule(
    "collective_rpc: the method is called once on every worker; results are in rank order",
    "return one result per worker, rank 0's first, and pass on every argument",
)
TIMEOUT = Rule(
    "timeout: collective_rpc raises TimeoutError when workers do not answer in time",
    "wait `timeout` seconds for all workers together, and keep late results from later calls",
)
ERRORS = Rule(
    "errors: an exception of a worker in any rank is raised, or set in the future",
    "pass on the first error of any rank, of the class that the worker raised, without waiting "
    "for the others, which may wait for the rank that failed",
)
SLEEP = Rule(
    "sleep: sleep and wake_up reach the workers",
    "let collective_rpc call any method of Worker, sleep and wake_up too",
)
PIPELINE = Rule(
    "pipeline: it serves max_concurrent_batches steps at a time",
    "return a future before the step is done, or state 1",
)
FAILURE = Rule(
    "failure: the loss of a worker fails all waiting calls, and is reported once to the callback",
    "when a worker ends, or are_out_of_step() is true of a call, set an error that names the rank "
    "in all futures, call the callback that on_failure got, and let later calls raise the error; a "
    "close is no loss",
)
CLOSE = Rule(
    "close: it releases the workers, its threads, processes and files, and may be called twice",
    "call abort and then close of each worker, join all threads, and return at once if it is "
    "closed already",
)
TOKENS = Rule(
    "tokens: requests get the tokens that they get with uniproc and one rank",
    "pass plans and results on unchanged",
)
