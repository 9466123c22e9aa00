"""The ring in MAX's cache tree: its rows, their kind, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from max import tree
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Graph, TensorValue
from max.nn.kv_cache import (
    KVCacheInputsPerDevice,
    MHAKVCacheParams,
    RecurrentKVLeafRegion,
    ScratchKVLeafRegion,
)

from kpool_graph import OperandError
from kpool_graph.serve import ring_cache, split_inputs

LAYERS, HEAD_DIM = 3, 32


def attention(**options):
    """The cache of a small model, its prefixes cached."""
    settings = {
        "dtype": DType.float32,
        "n_kv_heads": 2,
        "head_dim": 16,
        "num_layers": LAYERS,
        "devices": [DeviceRef.CPU()],
        "page_size": 128,
        "enable_prefix_caching": True,
    }
    return MHAKVCacheParams(**(settings | options))


def cache(params=None, **options):
    settings = {
        "num_layers": LAYERS,
        "kpool": 4,
        "head_dim": HEAD_DIM,
        "dtype": DType.float32,
    }
    return ring_cache(params or attention(), **(settings | options))


def ring_leaf(params):
    """The one leaf that is no attention cache's."""
    (leaf,) = (
        leaf
        for leaf in params.leaves().values()
        if isinstance(leaf, RecurrentKVLeafRegion)
    )
    return leaf


@pytest.mark.parametrize(
    ("kpool", "prefix_caching", "scratch"),
    [
        pytest.param(4, True, True, id="pools end with the pages"),
        pytest.param(3, True, False, id="a page ends inside a pool"),
        pytest.param(3, False, True, id="no prefix is reused"),
        pytest.param(256, True, False, id="a pool of two pages"),
        pytest.param(1, True, True, id="no pool is ever open"),
    ],
)
def test_rows_are_scratch_wherever_that_is_right(kpool, prefix_caching, scratch):
    params = cache(attention(enable_prefix_caching=prefix_caching), kpool=kpool)
    assert isinstance(ring_leaf(params), ScratchKVLeafRegion) == scratch


@pytest.mark.parametrize("kpool", [3, 4])
def test_recurrent_rows_can_be_had_for_any_kpool(kpool):
    leaf = ring_leaf(cache(kpool=kpool, scratch=False))
    assert not isinstance(leaf, ScratchKVLeafRegion)
    assert leaf.blocks_to_reserve(8, enable_prefix_caching=True) == 2


def test_scratch_that_reads_what_was_never_stashed_is_refused():
    with pytest.raises(OperandError) as error:
        cache(kpool=3, scratch=True)
    assert str(error.value) == (
        "ring_cache: scratch must be False or left out: prefix caching is on and"
        " page_size (128) is no multiple of kpool (3), so a reused prefix would end"
        " inside a pool whose first tokens the ring never saw"
    )
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert f"OperandError: {error.value}" in " ".join(page.split())


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_scratch_that_is_right_may_be_asked_for(prefix_caching):
    params = attention(enable_prefix_caching=prefix_caching)
    kpool = 4 if prefix_caching else 3
    leaf = ring_leaf(cache(params, kpool=kpool, scratch=True))
    assert isinstance(leaf, ScratchKVLeafRegion)


def test_a_row_holds_the_ring_of_one_layer():
    leaf = ring_leaf(cache(kpool=4, dtype=DType.bfloat16))
    assert leaf.region.row_shape == (2, 4, HEAD_DIM)
    assert leaf.region.num_layers == LAYERS
    assert leaf.region.dtype == DType.bfloat16
    assert leaf.bytes_per_page == LAYERS * 2 * 4 * HEAD_DIM * 2


def test_a_longer_ring_may_be_asked_for():
    assert ring_leaf(cache(ring_len=7)).region.row_shape == (2, 7, HEAD_DIM)


def speculative(drafts):
    return attention(speculative_method="eagle", num_draft_tokens=drafts)


def test_drafts_that_may_be_rejected_make_the_ring_longer():
    assert ring_leaf(cache(speculative(3))).region.row_shape[1] == 4 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kpool": 0}, "kpool must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"ring_len": 3}, "ring_len (3) must be at least kpool (4)"),
        ({"scratch": "yes"}, "scratch must be True, False or 'auto', got 'yes'"),
        (
            {"dtype": DType.int32},
            "dtype must be float32 or float16 or bfloat16, got int32",
        ),
        (
            {"params": speculative(3), "ring_len": 6},
            "ring_len (6) must be at least kpool + num_draft_tokens (7), or be left"
            " out",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(OperandError) as error:
        cache(**options)
    assert str(error.value) == f"ring_cache: {message}"


def test_all_problems_are_told_at_once():
    with pytest.raises(OperandError) as error:
        cache(kpool=0, head_dim=0, num_layers=0, dtype=DType.int8)
    assert len(str(error.value).splitlines()) == 4


@pytest.fixture
def inputs():
    """A graph's inputs for the cache, taken apart."""
    params = cache()
    types = tree.leaves(params.get_symbolic_inputs())
    with Graph("inputs", input_types=types) as graph:
        yield split_inputs(params.unflatten_kv_inputs(iter(graph.inputs)))


def test_the_inputs_are_the_attention_cache_and_the_ring(inputs):
    (attention_inputs,), _ = inputs
    assert isinstance(attention_inputs, KVCacheInputsPerDevice)
    assert isinstance(attention_inputs.cache_lengths, TensorValue)


def test_a_layer_gets_the_buffer_of_all_and_rows_of_its_own(inputs):
    _, ring = inputs
    rows = []
    for layer in range(LAYERS):
        tail, slot_idx = ring.layer(layer)
        assert isinstance(tail, BufferValue)
        assert tail.dtype == DType.float32
        assert [str(size) for size in tail.shape[1:]] == ["2", "4", str(HEAD_DIM)]
        assert slot_idx.dtype == DType.uint32
        assert slot_idx.rank == 1
        rows.append(slot_idx)
    assert len({id(each) for each in rows}) == LAYERS


@pytest.mark.parametrize("index", [-1, LAYERS])
def test_a_layer_without_a_ring_is_refused(inputs, index):
    _, ring = inputs
    with pytest.raises(OperandError) as error:
        ring.layer(index)
    assert str(error.value) == (
        f"ring.layer: index must be below num_layers ({LAYERS}), got {index}"
    )
