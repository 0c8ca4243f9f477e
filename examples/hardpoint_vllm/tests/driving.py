"""Helpers that drive an engine."""

from pathlib import Path

from hardpoint.testing import scripted_engine, write_scripted_model


def engine_with(folder: Path, enable=(), **extra):
    """Return an engine of the scripted model with vLLM's adapter and other plugins."""
    write_scripted_model(folder)
    plugins = {"enable": ["vllm", *enable], **extra.pop("plugins", {})}
    return scripted_engine(folder, {"plugins": plugins, **extra})


def run(engine, jobs, per_step=None):
    """Run jobs (id, prompt, parameters) and return the results by id.

    Args:
        engine: the engine.
        jobs: its requests.
        per_step: so many join before each step; None adds all at once.
    """
    waiting, results = list(jobs), {}
    while waiting or engine.has_unfinished_requests():
        joining = len(waiting) if per_step is None else per_step
        for request_id, prompt, params in waiting[:joining]:
            engine.add_request(request_id, prompt, params)
        waiting = waiting[joining:]
        for output in engine.step():
            if output.finished:
                results[output.request_id] = [summary(output)]
    return results


def alone(engine, jobs):
    """Run jobs one after another."""
    results = {}
    for job in jobs:
        results.update(run(engine, [job]))
    return results


def summary(output):
    """Return the results that must be equal between two runs of a request."""
    return [
        (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, _logprobs(c))
        for c in output.outputs
    ]


def _logprobs(completion):
    if completion.logprobs is None:
        return None
    return [{t: (v.logprob, v.rank) for t, v in entry.items()} for entry in completion.logprobs]
