"""A Llama with rings reads what its checkpoint says, or tells what is missing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from max.dtype import DType
from max.graph import DeviceRef
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.lib import KVCacheConfig

from kpool_graph import OperandError
from kpool_graph.serve import RingLlamaConfig, RingLlamaModel, llama_architecture


def kv_params(**settings):
    """The cache of a checkpoint of two layers, as MAX asks the config for it."""
    huggingface_config = SimpleNamespace(
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=16,
        hidden_size=64,
        **settings,
    )
    pipeline_config = SimpleNamespace(
        model=SimpleNamespace(data_parallel_degree=1), speculative=None
    )
    return RingLlamaConfig.construct_kv_params(
        huggingface_config,
        pipeline_config,
        [DeviceRef.CPU()],
        KVCacheConfig(),
        DType.float32,
    )


def test_every_layer_gets_a_ring_of_the_checkpoints_sizes():
    (region,) = kv_params(kpool=4, kpool_head_dim=32).children["ring"].regions
    assert region.num_layers == 2
    assert region.row_shape == (2, 4, 32)
    assert region.dtype == DType.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kpool_head_dim": 32}, "kpool, an integer, got None"),
        ({"kpool": 4}, "kpool_head_dim, an integer, got None"),
        ({"kpool": "4", "kpool_head_dim": 32}, "kpool, an integer, got '4'"),
    ],
    ids=["no kpool", "no kpool_head_dim", "kpool is text"],
)
def test_a_config_without_the_rings_sizes_is_refused(settings, message):
    with pytest.raises(ValueError) as error:
        kv_params(**settings)
    assert str(error.value) == f"config.json must have {message}"


def test_a_ring_that_cannot_be_is_refused_as_ring_cache_refuses_it():
    with pytest.raises(OperandError, match=r"^ring_cache: kpool must be at least 1"):
        kv_params(kpool=0, kpool_head_dim=32)


class Config(RingLlamaConfig):
    """A config of a test's own."""


class Model(RingLlamaModel):
    """Its model."""

    model_config_cls = Config


def test_an_architecture_is_a_llamas_and_says_that_it_has_state():
    architecture = llama_architecture("Some", Config, Model, multi_gpu_supported=False)
    assert architecture.name == "Some"
    assert architecture.config is Config
    assert architecture.pipeline_model is Model
    assert architecture.checkpoints_recurrent_state
    assert not architecture.supports_device_graph_capture


def test_any_field_of_an_architecture_may_be_another():
    other = llama_architecture("Some", Config, Model, example_repo_ids=["a/b"])
    assert other.example_repo_ids == ["a/b"]


@pytest.mark.parametrize("is_host", [True, False], ids=["cpu", "gpu"])
def test_a_step_on_a_cpu_waits_for_the_rows_that_max_copies(monkeypatch, is_host):
    calls = []
    monkeypatch.setattr(
        Llama3Model, "execute", lambda model, inputs: calls.append(("step", inputs))
    )
    model = object.__new__(RingLlamaModel)
    model.devices = [
        SimpleNamespace(is_host=is_host, synchronize=lambda: calls.append("wait"))
    ]
    model.execute("inputs")
    assert calls == (["wait"] if is_host else []) + [("step", "inputs")]
