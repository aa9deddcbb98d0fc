"""The batched choice against the reference, which goes node by node: the same tokens."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from devices import DEVICES
from outpace.core import Draft, NoTokenLeft, SamplingParams
from outpace.draws import many_rows
from outpace.draws.logits import Logits
from outpace.draws.many_rows import _SHORTLISTS, NO_TOKEN, _draw_cut, _Limits
from outpace.draws.noise import Key, noisy_argmax
from outpace.draws.own_tokens import Ask, Tree, _along, _everywhere, choose, own_tokens
from outpace.draws.sampling import Processor, best_tokens, warp
from outpace.native import build, draw
from outpace.sequence import KeyedDraw, Sequence
from outpace.tree import path_to
from outpace.verify import load_verifier

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Draws on the CPU: compiled for this machine, compiled without some of its instructions, from lists.
_LESS = ("-mno-avx512f", "-mno-avx") if platform.machine() == "x86_64" else ()
WAYS = ["", *(pytest.param(less, marks=pytest.mark.slow) for less in _LESS), "listed"]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way or "native")
def way(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTPACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(build, "FLAGS", (*build.FLAGS, *request.param.split()))
        made = "listed" if request.param == "listed" else draw.functions.__wrapped__()
        if isinstance(made, str) and request.param != "listed":
            pytest.skip(f"nothing is compiled here: {made}")
        patch.setattr(draw, "functions", lambda: made)
        yield request.param


@st.composite
def options(draw: st.DrawFn, vocabulary: int) -> dict[str, Any]:
    """Any parameters but ``logits_processors``; each is often left out, so that every path is taken."""

    def maybe(strategy: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw(strategy) if draw(st.booleans()) else otherwise

    penalty = st.sampled_from([-0.7, 0.3, 1.5])
    return {
        "temperature": draw(st.sampled_from([0.0, 0.8, 1.0, 0.3, 2.5, 1e-4, 5e-324, 30.0])),
        "top_k": maybe(st.integers(1, vocabulary + 2), 0),
        "top_p": maybe(st.sampled_from([0.9, 0.5, 1e-6, 0.999, 0.25]), 1.0),
        "min_p": maybe(st.sampled_from([0.05, 0.5, 1e-4, 1.0]), 0.0),
        "repetition_penalty": maybe(st.sampled_from([1.3, 0.6]), 1.0),
        "presence_penalty": maybe(penalty, 0.0),
        "frequency_penalty": maybe(penalty, 0.0),
        "logit_bias": maybe(
            st.dictionaries(st.integers(0, vocabulary - 1), st.sampled_from([-100.0, 2.5, 8.0]), max_size=4),
            {},
        ),
        "seed": maybe(st.integers(2**64 - 5, 2**64 - 1), draw(st.integers(0, 50))),
    }


def parents_of(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(-1, node - 1)) for node in range(size))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[tuple[Sequence, Draft, int]]]:
    """Rows of a forward, and of each sequence in it its draft and the row of its root."""
    vocabulary = draw(st.sampled_from([2, 5, 40, 300, 1500]))
    # Few tokens in the drafts and large logits for those make long walks, and nodes with equal texts.
    common = min(vocabulary, 3)
    sequences, first = [], draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 7))
        token = st.integers(0, common - 1)
        draft = Draft(tuple(draw(token) for _ in range(size)), parents_of(draw, size))
        params = SamplingParams(**draw(options(vocabulary)))
        assert params.seed is not None
        prompt = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=6))
        output = draw(st.lists(st.integers(0, vocabulary - 1), max_size=5))
        sequence = Sequence(prompt, params, Key(params.seed), limit=100, output=output)
        sequences.append((sequence, draft, first))
        first += 1 + size + draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rows = torch.randn(first, vocabulary, generator=generator, dtype=torch.float64)
    rows *= draw(st.sampled_from([0.5, 3.0, 30.0]))
    rows[:, :common] += draw(st.sampled_from([0.0, 4.0]))
    if draw(st.booleans()):
        rows = rows.round()  # equal logits: ties at every border
    for row in range(first):
        spoil(rows[row], draw(st.sampled_from([*[""] * 6, "-inf", "inf", "nan", "few", "none"])))
    return rows.to(draw(st.sampled_from(DTYPES))), sequences


def spoil(row: Tensor, how: str) -> None:
    if how in ("-inf", "inf", "nan"):
        row[1::3] = float(how)
    elif how == "few":
        row[1:] = -torch.inf
    elif how == "none":
        row[:] = -torch.inf


def reference(rows: Tensor, sequence: Sequence, draft: Draft, first: int, node: int) -> int:
    """The target's own token after a node, by the functions for one row."""
    path = [draft.tokens[above] for above in path_to(draft.parents, node)]
    row, params, processor = rows[first + 1 + node], sequence.params, sequence.processor
    if params.greedy:
        scores = row if processor.plain else processor.adjust(row, path)
        best = int(scores.argmax())
        return best if scores[best] > -torch.inf else NO_TOKEN
    try:
        word = sequence.key.target(sequence.output_length + len(path))
        return noisy_argmax(warp(processor.adjust(row, path), params), word)
    except NoTokenLeft:
        return NO_TOKEN


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@given(batch=batches())
def test_the_tokens_at_all_nodes_are_the_references(
    device: str, batch: tuple[Tensor, list[tuple[Sequence, Draft, int]]]
) -> None:
    rows, sequences = batch[0].to(device), batch[1]
    trees = [sequence.tree(draft, first) for sequence, draft, first in sequences]
    expected = [{node: reference(rows, *own, node) for node in range(-1, len(own[1]))} for own in sequences]
    assert _everywhere(rows, trees) == expected
    # Along the walks: no other token, and a token at each node that the walk looks at.
    for own, tree, found in zip(expected, trees, _along(rows, trees), strict=True):
        assert found.items() <= own.items()
        assert set(visited(tree, own)) <= set(found)


def visited(tree: Tree, own: dict[int, int]) -> Iterator[int]:
    """The first of the nodes with each text along the target's own tokens."""
    nodes = [-1]
    while nodes:
        yield nodes[0]
        tokens, parents = tree.draft.tokens, tree.draft.parents
        # Children in the order of their parents, as the verifiers follow them.
        nodes = [
            node
            for parent in nodes
            for node in range(len(tokens))
            if parents[node] == parent and tokens[node] == own[nodes[0]]
        ]


@given(batch=batches(), name=st.sampled_from(["match", "rejection", "typical"]))
def test_a_walk_is_the_same_with_the_tokens_found_before(
    batch: tuple[Tensor, list[tuple[Sequence, Draft, int]]], name: str
) -> None:
    """Tokens, path and errors, those of a sequence being its own."""
    rows, sequences = batch
    verifier = load_verifier(name)
    for sequence, draft, first in sequences:
        if not verifier.uses_own_tokens(sequence.params):
            continue
        (own,) = _along(rows, [sequence.tree(draft, first)])
        answers = []
        for found in ({}, own):
            again = Sequence(
                sequence.prompt, sequence.params, sequence.key, sequence.limit, output=sequence.output
            )
            try:
                verdict = verifier.verify(Logits(rows, first, 1 + len(draft)), draft, KeyedDraw(again, found))
                answers.append((verdict.tokens, verdict.path))
            except NoTokenLeft:
                answers.append((again.output, None))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_a_token_is_an_error_only_where_a_walk_comes_by(device: str) -> None:
    rows = torch.zeros(5, 6, device=device)
    rows[:, 2] = 5
    rows[2:4] = torch.nan  # below the root's child 2, and beside it
    for temperature in (0.0, 1e-4):
        params = SamplingParams(temperature=temperature)
        good, bad = (Sequence([1], params, Key(3), limit=9) for _ in range(2))
        trees = [good.tree(Draft((4,), (-1,)), 1), bad.tree(Draft((2,), (-1,)), 1)]
        reached, refused = _along(rows, trees)
        assert reached == {-1: 2} and refused == {-1: 2, 0: NO_TOKEN}
        match = load_verifier("match")
        assert match.verify(Logits(rows, 1, 2), trees[0].draft, KeyedDraw(good, reached)).tokens == [2]
        with pytest.raises(NoTokenLeft):
            match.verify(Logits(rows, 1, 2), trees[1].draft, KeyedDraw(bad, refused))
        with pytest.raises(NoTokenLeft):
            match.verify(Logits(rows, 2, 1), Draft(), KeyedDraw(Sequence([1], params, Key(3), limit=9)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [512, 49_152])
def test_rows_of_a_real_size_are_drawn_as_the_reference_draws_them(vocabulary: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = (torch.randn(24, vocabulary, generator=generator) * 3).to(device)
    rows[::2] = (rows[::2] * 4).round() / 4  # ties at every border
    rows[1::3, ::32] += 9  # the best tokens are far apart
    for options in ({"top_p": 0.9}, {"top_k": 12, "top_p": 0.95}, {"top_k": 300}, {"min_p": 0.05}, {}):
        params = SamplingParams(temperature=0.8, **options)  # type: ignore[arg-type]
        processor, key = Processor(params, [1]), Key(5)
        expected = [noisy_argmax(warp(row.clone(), params), key.target(i)) for i, row in enumerate(rows)]
        assert choose(rows, [Ask(i, processor, key, i) for i in range(24)]) == expected


@pytest.mark.usefixtures("way")
def test_most_draws_are_compiled() -> None:
    """A row that the compiled function leaves undecided costs a full sort."""
    functions = draw.functions()
    if isinstance(functions, str):
        pytest.skip(f"nothing is compiled here: {functions}")
    rows = torch.randn(200, 4096, generator=torch.Generator().manual_seed(1)) * 4
    for options in ({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {}):
        params = [SamplingParams(temperature=0.8, **options)] * 200  # type: ignore[arg-type]
        drawn = many_rows._draw_compiled(functions, rows, params, [row * 0x1234567 for row in range(200)])
        assert sum(token < 0 for token in drawn) <= 2


LISTS = [None, *_SHORTLISTS]  # by weight, and the N best tokens for each N


@pytest.mark.parametrize("size", LISTS[::2])
def test_most_rows_need_no_reference(size: int | None) -> None:
    """The lists decide nearly all of them: what they leave undecided costs a full sort."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, 4096, generator=generator) * 4
    params = [SamplingParams(temperature=0.8, top_p=0.9)] * 200
    words = [row * 0x1234567 for row in range(200)]
    drawn = _draw_cut(rows, words, _Limits.of(params, 4096), size)
    assert sum(token < 0 for token in drawn) <= 2


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("size", LISTS)
def test_what_a_list_decides_is_the_references_draw(size: int | None, spread: float) -> None:
    """Also with more tokens left than a list holds."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 1500, generator=generator) * spread
    rows[::2] = (rows[::2] * 4).round() / 4  # ties at every border
    words = [Key(5).target(index) for index in range(64)]
    for options in (
        {"top_p": 0.9},
        {"top_k": 100, "top_p": 0.5},
        {"top_k": 1200, "top_p": 0.9},
        {"min_p": 0.2},
    ):
        params = SamplingParams(temperature=1.0, **options)  # type: ignore[arg-type]
        expected = [noisy_argmax(warp(row, params), word) for row, word in zip(rows, words, strict=True)]
        drawn = _draw_cut(rows, words, _Limits.of([params] * 64, 1500), size)
        decided = {place: token for place, token in enumerate(drawn) if token >= 0}
        assert decided == {place: expected[place] for place in decided}
        assert decided or size is not None


def test_a_text_that_a_tree_holds_twice_is_followed_in_both_places() -> None:
    sequence = Sequence([1], SamplingParams(), Key(0), limit=9)
    rows = torch.eye(6)[[2, 2, 3, 4, 5]]
    (found,) = _along(rows, [sequence.tree(Draft((2, 2, 2, 3), (-1, -1, 1, 1)), 0)])
    assert found == {-1: 2, 0: 2, 2: 4}


# Logits, and the best token: the first on a tie; none where no logit is above -inf, or one is NaN.
ROWS = [
    ([0.5, 2.0, -1.0, 1.0], 1),
    ([3.0, -torch.inf, 3.0, 3.0], 0),
    ([-torch.inf, -torch.inf, -torch.inf, -5.0], 3),
    ([-torch.inf] * 4, NO_TOKEN),
    ([0.5, 2.0, torch.nan, 1.0], NO_TOKEN),
    ([torch.nan] * 4, NO_TOKEN),
    ([-torch.inf, torch.nan, -torch.inf, 0.0], NO_TOKEN),
    ([0.5, 2.0, 1.0, torch.inf], 3),
]


@pytest.mark.parametrize("kind", [*DTYPES, "array"], ids=str)
def test_the_best_token_of_rows_of_any_kind(kind: Any) -> None:
    logits, expected = torch.tensor([row for row, _ in ROWS]), [token for _, token in ROWS]
    rows = logits.numpy() if kind == "array" else logits.to(kind)
    assert best_tokens(rows) == expected
    assert [best_tokens(rows[place : place + 1])[0] for place in range(len(ROWS))] == expected


def test_own_tokens_of_plain_trees_come_from_the_array_of_the_rows() -> None:
    """With rows of other sequences between them; trees that are not plain are drawn from the tensor."""
    logits = torch.tensor([row for row, _ in ROWS])
    plain, sampled = (Processor(SamplingParams(temperature=t), ()) for t in (0.0, 0.8))
    draft = Draft((1, 3), (-1, -1))
    trees = [Tree(1, Draft(), plain, Key(0), 0), Tree(4, draft, plain, Key(0), 0)]
    expected = [{-1: 0}, {-1: NO_TOKEN, 0: NO_TOKEN, 1: NO_TOKEN}]
    assert own_tokens(torch.zeros_like(logits), trees, logits.numpy()) == expected
    assert own_tokens(logits, trees) == expected
    drawn = [Tree(0, Draft(), sampled, Key(3), 0), trees[0]]
    assert own_tokens(logits, drawn, torch.zeros_like(logits).numpy()) == own_tokens(logits, drawn)
