"""Drafts by suffix trees: both trees are the twins of plain counting, and all memory is bounded."""

from __future__ import annotations

import ctypes
import functools
import random
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.driving import FINAL, run
from support.searching import examples

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.speculators.suffix import Output, Outputs, Suffix
from hardpoint.builtin_plugins.speculators.suffix_tree import SuffixTree, make_tree
from hardpoint.kernels import cpu
from hardpoint.kernels import suffix_tree as compiled
from hardpoint.kernels.suffix_tree import Extent
from hardpoint.plugins import DraftRequest, SpeculatorContext
from hardpoint.testing import scripted_engine

FAR = Extent(100, factor=100.0, probability=0.0)


@pytest.fixture(scope="module", params=["python", "compiled"])
def new_tree(request):
    """Makes empty trees of a depth."""
    if request.param == "python":
        return SuffixTree
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))
    return compiled.CompiledSuffixTree


def counted(texts, depth, pattern, extent):
    """Return the drafts by looking at each place of each text, again for each token."""

    def places(tokens):
        spans = ((n, i, text[i : i + len(tokens)]) for n, text in texts for i in range(len(text)))
        return [(n, i) for n, i, span in spans if span == tokens]

    def follow(tokens, count, most):
        drafts, probability, score = [], 1.0, 0.0
        while len(drafts) < most and len(tokens) < depth:
            after = {t: places([*tokens, t]) for t in range(3)}
            token = max(after, key=lambda token: (len(after[token]), max(after[token], default=())))
            here = len(after[token])
            if here != count:
                probability = probability * here / max(count, 1)
            if not here or probability < extent.probability:
                break
            tokens, count = [*tokens, token], here
            drafts.append(token)
            score += probability
        return drafts, score

    best = [], 0.0
    for length in range(1, min(len(pattern), depth) + 1):
        tokens = pattern[-length:]
        most = min(extent.limit, int(length * extent.factor) + extent.offset)
        drafts, score = follow(tokens, len(places(tokens)), most)
        if drafts and score >= best[1]:
            best = drafts, score
    return best


steps = st.lists(
    st.one_of(
        st.just("begin"),
        st.just("remove"),
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=12)),
    ),
    max_size=16,
)
extents = st.builds(
    Extent,
    st.integers(1, 9),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.1, 0.5]),
)


@examples(8)
@given(steps, extents, st.sampled_from([2, 3, 8, 24]))
def test_drafts_are_those_of_plain_counting(new_tree, steps, extent, depth):
    tree, texts, oldest = new_tree(depth), [], 0
    for step in steps:
        if step == "remove" and texts:
            tree.remove_oldest()
            del texts[0]
            oldest += 1
        elif step == "begin" or not texts:
            assert tree.begin() == oldest + len(texts)
            texts.append([])
        elif step != "remove":
            index = step[0] % len(texts)
            tree.append(oldest + index, step[1])
            texts[index] += step[1]
        numbered = list(enumerate(texts))
        for text in texts:
            expected = counted(numbered, depth, text[-depth:], extent)
            assert tree.draft(text[-depth:], extent) == expected
        assert tree.draft([0, 1], extent) == counted(numbered, depth, [0, 1], extent)
        assert tree.num_nodes <= 2 * sum(map(len, texts))
    for _ in texts:
        tree.remove_oldest()
    assert tree.num_nodes == len(tree) == 0


def test_without_kernels_the_tree_is_that_in_python(monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, "off")
    cpu.load.cache_clear()
    try:
        assert type(make_tree(8)) is SuffixTree
    finally:
        cpu.load.cache_clear()


def long_texts(count=40, length=400):
    """Texts that repeat parts of themselves and of each other."""
    rng = random.Random(5)
    pieces = [[rng.randrange(500) for _ in range(rng.randrange(2, 40))] for _ in range(60)]
    for _ in range(count):
        text = []
        while len(text) < length:
            text += rng.choice(pieces) + [rng.randrange(500) for _ in range(rng.randrange(6))]
        yield text[:length]


def test_both_trees_draft_the_same_while_texts_come_and_go():
    try:
        trees = [SuffixTree(24), compiled.CompiledSuffixTree(24)]
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))
    for number, text in enumerate(long_texts()):
        for tree in trees:
            assert tree.begin() == number
            tree.append(number, text[:-40])
        for end in range(len(text) - 40, len(text)):
            ours, theirs = (tree.draft(text[end - 24 : end], Extent(8)) for tree in trees)
            assert ours == theirs
            for tree in trees:
                tree.append(number, [text[end]])
        if number % 10 == 9:  # most go, so that arrays are compacted
            for _ in range(9 if number < 30 else 13):
                for tree in trees:
                    tree.remove_oldest()
        assert trees[0].num_nodes == trees[1].num_nodes


class MallInfo(ctypes.Structure):
    """Bytes that the C library has handed out; its `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "mapped", *"fg", "used", *"ij")]


@functools.cache
def libc():
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("the C library does not tell what it has allocated")
    library.mallinfo2.restype = MallInfo
    return library


def allocated(native):
    """Return the bytes that Python or the C library have handed out."""
    if not native:
        return tracemalloc.get_traced_memory()[0]
    info = libc().mallinfo2()
    return info.used + info.mapped


@pytest.mark.parametrize(("count", "length"), [(2, 4000), (20, 400), (300, 30)])
def test_a_tree_occupies_at_most_its_num_bytes(request, new_tree, count, length):
    texts = list(long_texts(count, length))
    native = new_tree is compiled.CompiledSuffixTree
    compiled_first = make_tree(24)  # what is allocated once
    compiled_first.append(compiled_first.begin(), texts[0])
    if not native:
        tracemalloc.start()
        request.addfinalizer(tracemalloc.stop)
    before = allocated(native)
    tree = new_tree(24)
    for text in texts:
        tree.append(tree.begin(), text)
    assert 0.4 * tree.num_bytes < allocated(native) - before < tree.num_bytes
    before += 30_000  # what the test itself and the allocators keep
    for _ in texts[1:]:
        tree.remove_oldest()
        assert allocated(native) - before < tree.num_bytes
    tree.remove_oldest()
    del tree
    assert allocated(native) < before


def test_the_latest_of_equals_in_the_newest_text_is_drafted(new_tree):
    tree = new_tree(8)
    for text in ([1, 2, 3, 1, 2, 4], [1, 2, 5]):
        tree.append(tree.begin(), text)
    assert tree.draft([1, 2], FAR) == ([5], 1 / 3)
    tree.append(0, [1, 2, 4])
    assert tree.draft([1, 2], FAR)[0][0] == 4


def asking(request_id="r", prompt=(), output=(), scope="", limit=8, **arguments):
    return DraftRequest(
        *(request_id, list(prompt), list(output), SamplingParams()),
        *(Suffix.Arguments(**arguments), scope),
        limit=limit,
    )


def suffix(**options):
    return Suffix(
        SpeculatorContext(
            name="suffix",
            options=Suffix.Options(**options),
            device=torch.device("cpu"),
            vocab_size=1000,
            hidden_size=8,
            max_num_seqs=8,
            max_model_len=1000,
            num_draft_tokens=8,
        )
    )


def propose(speculator, *requests, budget=1000):
    for each in requests:
        if each.state is None:
            each.state = speculator.start(each)
    return speculator.propose(requests, budget)


TEXT = list(range(100, 140))


def test_the_own_text_and_earlier_outputs_are_drafted():
    speculator = suffix()
    request = asking(prompt=TEXT, output=[7, *TEXT[:5]])
    assert propose(speculator, request) == [TEXT[5:10]]  # as many as are the same
    request.output_token_ids += TEXT[5:20]
    assert propose(speculator, request) == [TEXT[20:28]]  # its limit
    speculator.ended(request)
    other = asking("other", prompt=[1, 2], output=TEXT[:3])
    assert propose(speculator, other) == [TEXT[3:6]]
    running = asking("running", prompt=[3, 4], output=[50, 51, 52, 53])
    also = asking("also", prompt=[5, 50, 51])
    assert propose(speculator, running, also) == [[], [52, 53]]


def test_arguments_of_a_request_replace_options():
    speculator = suffix(max_spec_factor=0.5)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    assert propose(speculator, asking(prompt=prompt)) == [[5, 6]]
    assert propose(speculator, asking(prompt=prompt, max_spec_factor=1.0)) == [[5, 6, 7, 8]]
    assert propose(speculator, asking(prompt=prompt, max_spec_offset=1)) == [[5, 6, 7]]
    prompt = [1, 2, 1, 3, 1, 4, 1]
    assert propose(speculator, asking(prompt=prompt, max_spec_offset=1)) == [[4]]
    unsure = asking(prompt=prompt, max_spec_offset=1, min_token_prob=0.4)
    assert propose(speculator, unsure) == [[]]


def test_a_budget_is_for_the_drafts_with_the_highest_scores():
    requests = [asking(str(same), prompt=TEXT + TEXT[:same]) for same in (2, 6, 4)]
    drafts = [TEXT[2:4], TEXT[6:12], TEXT[4:8]]
    speculator = suffix()
    assert propose(speculator, *requests) == drafts
    assert propose(speculator, *requests, budget=8) == [[], drafts[1], drafts[2][:2]]
    assert propose(speculator, *requests, budget=0) == [[], [], []]


def test_requests_of_other_scopes_are_not_seen():
    speculator = suffix()
    secret = asking("secret", output=TEXT, scope="a")
    propose(speculator, secret)
    for scope, expected in (("b", []), ("", []), ("a", TEXT[4:8])):
        other = asking(scope, prompt=TEXT[:4], scope=scope)
        assert propose(speculator, other) == [expected]
        speculator.ended(other)
    speculator.ended(secret)
    assert propose(speculator, asking("b", prompt=TEXT[:4], scope="b")) == [[]]
    assert propose(speculator, asking("a", prompt=TEXT[:4], scope="a")) == [TEXT[4:8]]


def test_outputs_beyond_the_limits_go_the_oldest_first():
    store = Outputs(8, max_requests=3, max_bytes=1 << 30)
    outputs = [Output(scope) for scope in "abab"]
    for start, output in enumerate(outputs):
        store.append(output, range(100 * start, 100 * start + 20))
    assert len(store) == 3
    drafts = [store.draft(s, [100 * n, 100 * n + 1], FAR)[0] for n, s in enumerate("abab")]
    assert [len(drafts) for drafts in drafts] == [0, 7, 7, 7]
    store.append(outputs[0], [1, 2, 3])  # a running one that was removed: it begins again
    assert (len(store), outputs[1].sequence) == (3, None)
    assert store.draft("a", [1], FAR)[0] == [2, 3]


def test_bytes_of_all_scopes_together_are_bounded():
    outputs = Outputs(24, max_requests=1000, max_bytes=1 << 18)
    rng = random.Random(3)
    most = 0
    for index in range(300):
        outputs.append(Output(f"scope {index % 7}"), [rng.randrange(500) for _ in range(80)])
        most = max(most, outputs.num_bytes)
    assert 1 << 17 < most <= 1 << 18
    last = Output("new")
    for _ in range(100):  # alone too large
        outputs.append(last, [rng.randrange(500) for _ in range(80)])
        assert outputs.num_bytes <= 1 << 18
    while len(outputs):
        outputs.remove_oldest()
    assert outputs.num_bytes == 0  # and no empty tree is left


def test_no_outputs_are_kept_if_there_are_to_be_none():
    speculator = suffix(max_cached_requests=0)
    first = asking(output=TEXT, prompt=[1])
    propose(speculator, first)
    speculator.ended(first)
    assert propose(speculator, asking(prompt=TEXT[:4])) == [[]]


def test_what_cannot_be_allocated_leaves_the_tree_as_it_is(monkeypatch, new_tree):
    if new_tree is SuffixTree:
        pytest.skip("Python says so itself")
    with pytest.raises(MemoryError, match="no memory for a tree of suffixes"):
        new_tree(1 << 45).begin()
    outputs = Outputs(8, max_requests=3, max_bytes=1 << 30)
    monkeypatch.setattr(new_tree, "append", lambda *_: (_ for _ in ()).throw(MemoryError()))
    output = Output("a")
    with pytest.raises(MemoryError):
        outputs.append(output, [1, 2])
    assert len(outputs) == 1
    assert outputs.num_bytes > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_output(scripted, temperature):
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=60, ignore_eos=True, n=2, **FINAL
    )
    jobs = [(str(index), prompt, params) for index, prompt in enumerate(["long", "say abc", "x"])]
    plain = scripted_engine(scripted)
    expected = run(plain, jobs)
    plain.close()
    engine = scripted_engine(scripted, {"speculation": {"use": ["suffix"], "adaptive": False}})
    accepted = []
    for _ in range(2):
        assert run(engine, jobs) == expected
        accepted.append(engine.call_utility("scheduler_stats").num_accepted_drafts)
    engine.close()
    # The second time all is drafted from the outputs of the first.
    assert accepted[1] - accepted[0] > max(accepted[0], 200)
