"""`/v1/systemone`: typed questions about a state."""

import json
import math

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import server_config, write_model
from support.waiting import wait_until

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins import typed_answers
from hardpoint.kernels import cpu
from hardpoint.plugins import OverloadedError
from hardpoint.plugins.server import Authenticator, Client

PATH = "/v1/systemone"
STATE = {"message": "WIN a free phone", "sender": None, "words": [4, True]}
SPAM = {"type": "noul", "instructions": "Is it spam?", "criteria": {"true": "It sells."}}
TONE = {"type": "choice", "instructions": "Tone?", "criteria": {"calm": None, "loud": "It shouts."}}
LEVEL = {"type": "score", "criteria": ["none", {"some": 1}, "much"]}
QUESTIONS = {"spam": SPAM, "tone": TONE, "level": LEVEL}


def ask(server, questions, state=STATE, **fields):
    response = server.post(PATH, {"state": state, "questions": questions, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refused(server, status=400, headers=None, **fields):
    body = {"state": "s", "questions": {"a": SPAM}, **fields}
    response = server.post(PATH, body, headers=headers or {})
    assert response.status_code == status, response.text
    return response.json()["error"]


def fake(**settings):
    """A server with a fake engine that records its requests."""
    config = configured(**settings.pop("server", {}))
    return running(FakeEngine(config=config, hooks=(typed_answers,), text="x", **settings))


# Answers


def test_each_type_has_its_answer(server):
    answer = ask(server, QUESTIONS)
    assert list(answer["answers"]) == ["spam", "tone", "level"]
    spam, tone, level = answer["answers"].values()
    assert set(spam) == {"type", "noul", "x_label_mass"}
    assert (spam["type"], 0 < spam["noul"] < 1) == ("noul", True)
    assert list(tone["probabilities"]) == ["calm", "loud"]
    best = max(tone["probabilities"], key=tone["probabilities"].get)
    assert (tone["type"], tone["choice"]) == ("choice", best)
    assert math.isclose(tone["confidence"], 2 * tone["probabilities"][best] - 1)
    assert level["legend"] == dict(zip("012", LEVEL["criteria"], strict=True))
    assert math.isclose(level["score"], sum(int(i) * p for i, p in level["probabilities"].items()))
    for typed_answer in (tone, level):
        assert math.isclose(sum(typed_answer["probabilities"].values()), 1)
    assert all(0 < typed_answer["x_label_mass"] < 1 for typed_answer in answer["answers"].values())
    assert answer["id"].startswith("systemone-")
    assert answer["model"] == "scripted"
    assert answer["usage"]["output_tokens"] == 0


def test_probabilities_are_those_that_the_model_gives_to_the_labels(server):
    """Asked over another route, token for token: of one token, and of three in turn."""
    prompt = (
        'user: {"message": "WIN a free phone", "sender": null, "words": [4, true]}\n\n'
        "Question: Tone?\nA: calm\nB: loud - It shouts.\n"
        "Answer with the letter of one option alone.\nassistant: "
    )

    def logprob(text, token):
        (named,) = server.post("/tokenize", {"prompt": token}).json()["tokens"]
        body = {"prompt": text, "max_tokens": 1, "logprob_token_ids": [named]}
        body |= {"return_tokens_as_token_ids": True, "temperature": 0}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        return choice["logprobs"]["top_logprobs"][0][f"token_id:{named}"]

    labels = {"calm": logprob(prompt, "A"), "loud": logprob(prompt, "B")}
    mass = sum(map(math.exp, labels.values()))
    tone = ask(server, {"tone": TONE})["answers"]["tone"]
    assert math.isclose(tone["x_label_mass"], mass)
    for name, value in labels.items():
        assert math.isclose(tone["probabilities"][name], math.exp(value) / mass)
    start = "user: s\n\nQuestion: Is it spam?\nYes: It sells.\nAnswer Yes or No alone.\nassistant: "
    sides = [
        math.exp(math.fsum(logprob(start + label[:i], token) for i, token in enumerate(label)))
        for label in ("Yes", "No")
    ]
    spam = ask(server, {"spam": SPAM}, "s")["answers"]["spam"]
    assert math.isclose(spam["noul"], sides[0] / sum(sides))
    assert math.isclose(spam["x_label_mass"], sum(sides))


def many(count):
    kinds = [
        lambda i: {"type": "noul", "instructions": f"Is it {i}?"},
        lambda i: {"type": "choice", "criteria": {f"{i}{name}": None for name in "abcdefg"}},
        lambda i: {"type": "score", "instructions": "x" * i, "criteria": ["low", "high"]},
    ]
    return {f"q{i}": kinds[i % 3](i) for i in range(count)}


def test_a_question_has_the_answer_that_it_has_alone(server):
    questions = many(64)
    together = ask(server, questions)
    for name, question in questions.items():
        alone = ask(server, {name: question}, cache_salt=name)
        assert alone["answers"] == {name: together["answers"][name]}
        assert alone["usage"]["cached_tokens"] < alone["usage"]["input_tokens"]


@pytest.mark.nightly
def test_the_same_on_a_real_model():
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"torch gives other last bits in other batches, and the kernels: {cause}")
    state = "The parcel came late. 'The worst shop ever, I want my money back!' " * 6
    questions = many(6)
    tables = {"server": {"port": 0, "access_log": "off"}, "stats": {"sinks": []}}
    llm = AsyncLLM("smollm2", dtype="bfloat16", max_model_len=1024, config=tables)
    with running(llm) as server:
        together = ask(server, questions, state)
        size = len(server.post("/tokenize", {"prompt": state}).json()["tokens"])
        usage = together["usage"]
        assert usage["cached_tokens"] > (len(questions) - 1) * (size - 32)
        for name, question in questions.items():
            alone = ask(server, {name: question}, state, cache_salt=name)
            assert alone["answers"] == {name: together["answers"][name]}


def test_the_state_is_computed_once(server):
    state = "A long story. " * 20
    usage = ask(server, {f"q{i}": LEVEL for i in range(10)}, state, cache_salt="once")["usage"]
    assert usage["cached_tokens"] > 9 * (len(state) - 16)
    assert usage["input_tokens"] > 10 * len(state)


# Prompts


def test_prompts_are_the_state_then_the_question():
    with fake() as server:
        ask(server, QUESTIONS, instructions="You are a filter.")
        texts = ["".join(map(chr, prompt)) for prompt, _, _ in server.engine.asked]
        parameters = [params for _, params, _ in server.engine.asked]
    start = '<user>You are a filter.\n\n{"message": "WIN a free phone", "sender": null, "words": '
    start += "[4, true]}\n\n"
    spam = f"{start}Question: Is it spam?\nYes: It sells.\nAnswer Yes or No alone."
    tone = f"{start}Question: Tone?\nA: calm\nB: loud - It shouts.\n"
    tone += "Answer with the letter of one option alone."
    level = f'{start}0: none\n1: {{"some": 1}}\n2: much\nAnswer with the number of one level alone.'
    rows = [
        (spam, "YN"),
        (f"{spam}Y", "e"),
        (f"{spam}Ye", "s"),
        (f"{spam}N", "o"),
        (tone, "AB"),
        (level, "012"),
    ]
    assert texts == [text for text, _ in rows]
    assert ["".join(map(chr, p.logprob_token_ids)) for p in parameters] == [ids for _, ids in rows]
    assert {(p.max_tokens, p.temperature, p.detokenize) for p in parameters} == {(1, 0.0, False)}


def test_a_model_without_a_template_is_asked_for_an_answer():
    with fake() as server:
        server.engine.tokenizer.chat_template = None
        ask(server, {"tone": {**TONE, "instructions": None}}, "s")
        ((prompt, params, _),) = [a for a in server.engine.asked if len(a[1].logprob_token_ids) > 1]
    text = "s\n\nA: calm\nB: loud - It shouts.\nAnswer with the letter of one option alone."
    assert prompt == [1, *map(ord, f"{text}\nAnswer: ")]
    assert params.logprob_token_ids == [65, 66]


def test_a_template_that_changes_texts_is_refused():
    async def shouting(messages, **_):
        return {"prompt": messages[0]["content"].upper()}

    with fake() as server:
        server.engine.apply_chat_template = shouting
        assert refused(server)["message"] == (
            "model: expected a chat template that has the text of a message once, as it is"
        )


def test_labels_that_tokens_do_not_tell_apart_are_refused():
    with fake() as server:
        server.engine.tokenizer.encode = lambda text, **_: [1] * len(text)
        error = refused(server, questions={"fine": LEVEL, "mine": TONE})
        assert error["param"] == "questions.fine"
        assert error["message"].endswith(
            "does not distinguish the label '0' from the others at the place of the answer"
        )
        assert server.engine.asked == []


# What is refused, before anything runs


def question(**fields):
    return {"questions": {"fine": SPAM, "mine": fields}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"questions": {}}, "questions", "expected a table of length >= 1"),
        ({"questions": many(65)}, "questions", "expected a table of length <= 64"),
        ({"questions": [SPAM]}, "questions", "expected a table, got ["),
        ({"state": 5}, "state", "expected a string or a table or a list, got 5"),
        ({"state": None}, "state", "missing"),
        ({"stat": "s"}, "stat", "did you mean 'state'?"),
        ({"images": ["x"]}, "images", "not supported: the state is text or JSON"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "not supported"),
        ({"priority": "high"}, "priority", "expected a whole number"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        (question(type="guess"), "questions.mine.type", 'expected "noul" or "choice" or "score"'),
        (question(), "questions.mine.type", "missing"),
        (question(type="noul", criteria={"yes": "x"}), "questions.mine.criteria.yes", "unknown"),
        (question(type="noul", instructions=5), "questions.mine.instructions", "got 5"),
        (question(type="noul", weight=5), "questions.mine.weight", "unknown field"),
        (question(type="choice"), "questions.mine.criteria", "missing"),
        (question(type="choice", criteria={"a": None}), "questions.mine.criteria", "length >= 2"),
        (
            question(type="choice", criteria=dict.fromkeys(map(str, range(27)))),
            "questions.mine.criteria",
            "length <= 26",
        ),
        (question(type="score", criteria=["a"]), "questions.mine.criteria", "length >= 2"),
        (question(type="score", criteria=["a"] * 11), "questions.mine.criteria", "length <= 10"),
        (question(type="score", criteria=["a", 2]), "questions.mine.criteria[1]", "got 2"),
        (
            question(type="noul", instructions="x" * 1000),
            "questions.mine",
            "with the state, the prompt is too long: ",
        ),
        ({"state": "x" * 40_000}, "state", "expected at most 32768 characters"),
    ],
)
def test_what_is_wrong_is_named(server, fields, param, words):
    before = server.call(lambda: server.engine.metrics())
    error = refused(server, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert server.call(lambda: server.engine.metrics()) == before
    assert ask(server, {"a": LEVEL}, "s")["answers"]


def test_a_prompt_that_is_too_long_has_a_code(server):
    error = refused(server, state="x" * 1100)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "questions.a")


def test_another_model_is_not_found(server):
    error = refused(server, 404, model="gpt")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert ask(server, {"a": LEVEL}, model="other")["model"] == "other"


# Clients


def keys():
    clients = {
        "ann": Client(name="ann", cache_salt="pepper", tags={"team": "a"}, max_timeout=9.0),
        "bob": Client(name="bob", min_priority=2),
    }

    async def authenticate(headers, path):
        return clients.get(headers.get("x-api-key"))

    return (("keys", Authenticator(authenticate=authenticate)),)


def test_requests_are_within_the_bounds_of_their_key():
    with fake(extensions=keys()) as server:
        assert refused(server, 401)["type"] == "authentication_error"
        ann, bob = {"x-api-key": "ann"}, {"x-api-key": "bob"}
        body = {"state": "s", "questions": {"a": LEVEL}, "cache_salt": "own"}
        body |= {"tags": {"team": "b", "job": "1"}, "priority": 1}
        assert server.post(PATH, body, headers=ann).status_code == 200
        ((_, _, options),) = server.engine.asked
        assert options["tags"] == {"team": "a", "job": "1", "tenant": "ann"}
        assert (options["priority"], options["timeout"]) == (1, 9.0)
        assert len(options["cache_salt"]) == 64
        assert options["request_id"].startswith("systemone-")
        error = refused(server, headers=bob, priority=1)
        assert error["message"].startswith("priority: expected 2 to ")
        error = refused(server, headers=ann, timeout=10)
        assert error["message"].startswith("timeout: expected at most 9 s")
        assert len(server.engine.asked) == 1


def test_a_call_counts_as_one_request_and_ends_with_its_client():
    with fake(delay=3600.0, server={"limits": {"requests": 1}}) as server:
        body = json.dumps({"state": "s", "questions": {"a": LEVEL, "b": SPAM}})
        connection = server.socket()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: server.engine.open == 5)
        assert server.service.load.open == 1
        assert refused(server, 429)["code"] == "overloaded"
        connection.close()
        wait_until(lambda: server.engine.open == server.service.load.open == 0)
        assert server.engine.aborted == 5


@pytest.mark.nightly
def test_a_call_has_no_more_requests_than_the_engine_lets_wait(tmp_path):
    answers = []
    for most in (1, 400):
        model = write_model(tmp_path / str(most))
        config = server_config(model, scheduler={"max_waiting": most, "max_num_seqs": 1})
        with running(AsyncLLM(config=config)) as server:
            answers.append(ask(server, many(9))["answers"])
    assert answers[0] == answers[1]


def test_no_call_is_taken_while_the_engine_is_paused():
    with fake() as server:
        server.service.paused = "the engine is paused"
        assert refused(server, 503)["message"] == "the engine is paused"
        assert server.engine.asked == []


@pytest.mark.parametrize(
    ("reason", "status", "words"),
    [
        ("timeout", 503, "the questions were not answered in time"),
        ("abort", 503, "the engine has ended the questions; send them again"),
        ("error", 500, "the engine gave no reason"),
    ],
)
def test_questions_that_end_without_an_answer(reason, status, words):
    class Ended(FakeEngine):
        def _outputs(self, text, ids, params, request_id):
            for output in super()._outputs(text, ids, params, request_id):
                output.outputs[0].token_ids = []
                yield output

    config = configured()
    with running(Ended(config=config, hooks=(typed_answers,), finish_reason=reason)) as server:
        assert words in refused(server, status)["message"]


def test_an_error_of_one_question_ends_all():
    with fake(error=OverloadedError("no room")) as server:
        assert refused(server, 429)["message"] == "no room"
        assert server.engine.open == 0
