"""Steps of trees against plain steps, which prefill each branch as a prompt: windows, pages, a batch, a draft."""

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.engine.model import DecoderModel
from paged_kv.engine.tree_model import TreeModel
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from support.checkpoints import make_checkpoint, relative_error
from support.llama_family import poison
from support.trees import path_to, random_parents

pytestmark = pytest.mark.slow

PAGE_SIZE, VOCAB = 5, 256
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "sliding_window": 6,
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Two layers that see six tokens back, the first of which is the draft."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, family="Mistral", **SIZES)
    model = DecoderModel.from_folder(folder, dtype=DType.float32, num_pages=60, page_size=PAGE_SIZE)
    assert model.config.windows
    return TreeModel(model, draft_layers=1, largest_tree=24)


class Run:
    """Prompts in the cache, each with a tree after it; every page was NaN."""

    def __init__(self, trees, seed):
        rng = np.random.default_rng(seed)
        poison(trees.model)
        self.prompts = [rng.integers(0, VOCAB, n).tolist() for n in (11, 1, 7)]
        self.parents = [random_parents(rng, n).tolist() for n in (20, 9, 1)]
        self.tokens = [rng.integers(0, VOCAB, len(parents)).tolist() for parents in self.parents]
        order = iter(rng.permutation(30).tolist())
        needed = [-(-(len(p) + len(t) + 8) // PAGE_SIZE) for p, t in zip(self.prompts, self.tokens, strict=True)]
        self.pages = [[next(order) for _ in range(n)] for n in needed]
        self.cached = [len(prompt) for prompt in self.prompts]
        chains = [list(range(-1, n - 1)) for n in self.cached]
        trees.step(self.prompts, chains, [0, 0, 0], self.pages)

    def branch(self, request, row):
        """The prompt of a request and the tokens of a row's path."""
        return self.prompts[request] + [self.tokens[request][i] for i in path_to(self.parents[request], row)]


def alone(trees, tokens, pages=range(30, 60)):
    """Logits after the last of some tokens, prefilled by the plain step in pages that no run uses."""
    return trees.model.step([tokens], [0], [list(pages)])[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_row_has_the_logits_of_its_branch(trees, seed):
    run = Run(trees, seed)
    logits = trees.step(run.tokens, run.parents, run.cached, run.pages)
    for request, of_request in enumerate(logits):
        for row, got in enumerate(of_request):
            assert relative_error(got, alone(trees, run.branch(request, row))) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_a_kept_path_is_decoded_on(trees, seed):
    """The next step is a tree for one request, one token for another; what was refused is overwritten."""
    run = Run(trees, seed)
    trees.step(run.tokens, run.parents, run.cached, run.pages)
    kept = [path_to(parents, len(parents) - 1) for parents in run.parents]
    trees.keep(kept, run.cached, run.pages)
    cached = [n + len(rows) for n, rows in zip(run.cached, kept, strict=True)]
    texts = [run.branch(request, rows[-1]) for request, rows in enumerate(kept)]
    logits = trees.step([[3, 4, 5], [6], [7]], [[-1, 0, 0], [-1], [-1]], cached, run.pages)
    branches = [texts[0] + [3], texts[0] + [3, 4], texts[0] + [3, 5], texts[1] + [6], texts[2] + [7]]
    for got, branch in zip(np.concatenate(logits), branches, strict=True):
        assert relative_error(got, alone(trees, branch)) < 1e-4


def test_a_draft_leaves_nothing_that_the_step_does_not_overwrite(trees):
    run = Run(trees, 0)
    draft = trees.step(run.tokens, run.parents, run.cached, run.pages, draft=True)
    whole = trees.step(run.tokens, run.parents, run.cached, run.pages)
    again = trees.step(run.tokens, run.parents, run.cached, run.pages, draft=True)
    assert relative_error(whole[0][-1], alone(trees, run.branch(0, len(run.tokens[0]) - 1))) < 1e-4
    for first, second, of_model in zip(draft, again, whole, strict=True):
        np.testing.assert_array_equal(first, second)
        assert relative_error(first, of_model) > 1e-3  # one layer is not two


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokens": [[1, VOCAB + 500]]}, ContractError, "tokens: request 0"),
        ({"parents": [[-1]]}, ShapeError, "parents: request 0 has 1, and 2 tokens"),
        ({"parents": [[-1, 1]]}, ValueError, "parents: row 1 .request 0, its row 1. has parent 1"),
        ({"tokens": [[1] * 26], "parents": [[-1, *[0] * 25]]}, ValueError, "planned for trees of up to 24 rows"),
    ],
)
def test_steps_that_are_refused(trees, change, error, words):
    good = {"tokens": [[1, 2]], "parents": [[-1, 0]], "cache_lengths": [0], "pages": [list(range(8))]}
    with pytest.raises(error, match=words):
        trees.step(**(good | change))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"draft_layers": 3}, ContractError, "draft_layers must be at most 2"),
        ({"draft_layers": 0}, ContractError, "draft_layers must be at least 1"),
        ({"draft_layers": 1.0}, ContractTypeError, "draft_layers must be an integer"),
        ({"largest_tree": 0}, ContractError, "largest_tree must be at least 1"),
    ],
)
def test_models_that_are_refused(trees, arguments, error, words):
    with pytest.raises(error, match=words):
        TreeModel(trees.model, **arguments)
