"""Programs that evaluate and load servers: lm-eval, guidellm, vLLM's benchmark."""

import json
import os
import shutil
import subprocess

import pytest

from hardpoint import LLM, SamplingParams

pytestmark = pytest.mark.nightly

QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "a loaf of bread"]),
    ("Two plus two makes", ["four", "nine hundred"]),
    ("Water is made of hydrogen and", ["oxygen", "plutonium", "w\u00f6rds \U0001f600"]),
]
TASK = """
task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def run(command, folder):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def log_likelihoods():
    """Return the results of LLM: per question and choice the sum, and whether it is greedy."""
    config = {"device": "cpu"}
    with LLM("smollm2", dtype="float32", max_model_len=2048, config=config, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        encode = llm.tokenizer.encode
        results = []
        for question, choices in QUESTIONS:
            before = len(encode(question))
            prompts = [encode(f"{question} {choice}") for choice in choices]
            row = []
            for output in llm.generate(prompts, params):
                pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
                chosen = [place[token] for token, place in pairs[before:]]
                row.append(
                    (sum(logprob.logprob for logprob in chosen), all(o.rank == 1 for o in chosen))
                )
            results.append(row)
    return results


def test_lm_eval_gets_our_own_log_likelihoods(
    demo_url, tokenizer_folder, evaluation_programs, tmp_path
):
    data = tmp_path / "data.jsonl"
    rows = [{"question": question, "choices": choices} for question, choices in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "questions.yaml").write_text(TASK.format(data=data))
    model = f"model=smollm2,base_url={demo_url}/v1/completions,tokenizer={tokenizer_folder}"
    command = [evaluation_programs / "lm_eval", "--model", "local-completions"]
    command += ["--model_args", f"{model},tokenizer_backend=huggingface"]
    command += ["--tasks", "questions", "--include_path", tmp_path]
    run([*command, "--output_path", tmp_path / "out", "--log_samples"], tmp_path)
    (samples,) = tmp_path.glob("out/*/samples_*.jsonl")
    answered = [json.loads(line) for line in samples.read_text().splitlines()]
    answered.sort(key=lambda sample: sample["doc_id"])
    expected = log_likelihoods()
    for sample, row in zip(answered, expected, strict=True):
        got = [(float(value), greedy == "True") for ((value, greedy),) in sample["resps"]]
        assert [greedy for _, greedy in got] == [greedy for _, greedy in row]
        assert [value for value, _ in got] == pytest.approx([value for value, _ in row], abs=2e-3)


@pytest.mark.parametrize("profile", ["kind=concurrent,streams=4", "kind=poisson,rate=20"])
def test_guidellm_runs_through(demo_url, tokenizer_folder, evaluation_programs, tmp_path, profile):
    command = [evaluation_programs / "guidellm", "run"]
    command += ["--backend", f"kind=openai_http,target={demo_url}"]
    command += ["--profile", profile]
    command += ["--constraint", "kind=max_requests,count=8"]
    command += ["--constraint", "kind=max_duration,seconds=600"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"]
    run(command, tmp_path)
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (8, [])
    assert {request["output_tokens"] for request in requests["successful"]} == {8}


def test_vllms_benchmark_runs_through(demo_url, tokenizer_folder, tmp_path):
    if shutil.which("vllm") is None:
        pytest.skip("needs vllm, which is not installed: it brings its own torch")
    command = ["vllm", "bench", "serve", "--base-url", demo_url, "--model", "smollm2"]
    command += ["--tokenizer", tokenizer_folder, "--dataset-name", "random", "--num-prompts", 8]
    command += ["--random-input-len", 32, "--random-output-len", 8, "--ignore-eos"]
    run([*command, "--save-result", "--result-filename", "result.json"], tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (8, 64)
