"""Models of the field through an arena on the CPU: they answer bit for bit what a fresh load does."""

from __future__ import annotations

import pytest
import torch

from gpuworker.weights.cpu import CpuArena
from tests.models import MODELS, audio, through_an_arena

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),
    pytest.mark.xdist_group("models"),  # so that one process imports transformers, for seconds, and not all
]


@pytest.mark.parametrize("name", MODELS)
def test_an_attached_model_answers_what_a_fresh_load_does(name: str) -> None:
    model = MODELS[name]
    attached, fresh = through_an_arena(model.fresh(), CpuArena()), model.fresh()
    assert torch.equal(model.ask(attached), model.ask(fresh))
    for tensors in ("named_parameters", "named_buffers"):
        expected, found = (dict(getattr(one, tensors)()) for one in (fresh, attached))
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tied_embeddings_stay_one_parameter(name: str) -> None:
    attached = through_an_arena(MODELS[name].fresh(), CpuArena())
    assert attached.get_output_embeddings().weight is attached.get_input_embeddings().weight


@torch.inference_mode()
def test_a_state_goes_on_where_it_was() -> None:
    model = MODELS["silero"].fresh()
    first, second = audio(torch.device("cpu")).chunk(2)
    for chunk in first:
        model(chunk, 16000)
    attached = through_an_arena(model, CpuArena())
    answers = [[one(chunk, 16000).item() for chunk in second] for one in (attached, model)]
    assert answers[0] == answers[1]
    model.reset_states()
    assert answers[0] != [model(chunk, 16000).item() for chunk in second], "it has a state"
