"""Models of the field with random weights: how to make them, and what to ask them, on whatever device they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpuworker.weights import staging
from gpuworker.weights.arena import Arena, lay_out, slices
from gpuworker.weights.cpu import CpuArena
from gpuworker.weights.packing import pack, unpack

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers and timm are imported


@dataclass(frozen=True)
class Model:
    make: Callable[[], torch.nn.Module]
    question: Callable[[Any], torch.Tensor]

    def fresh(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    @torch.inference_mode()
    def ask(self, model: Any) -> torch.Tensor:
        return self.question(model)


def through_an_arena(loaded: Any, arena: Arena) -> Any:
    """What a worker that attaches gets of `loaded`."""
    packed = pack(loaded)
    layout = lay_out([s.storage.nbytes() for s in packed.sources], [s.private for s in packed.sources])
    fd, memory = arena.create(layout.nbytes)
    places = [memory[offset : offset + size] for offset, size in layout.places]
    staging.copy(zip([s.storage for s in packed.sources], places, strict=True), lambda done, seconds: None)
    arena.finish(fd, mutable=False)
    start = time.perf_counter()
    attached = arena.attach(fd, layout.nbytes, mutable=False)
    mapped = time.perf_counter()
    result = unpack(packed.pickle, slices(layout, attached, copy_private=not isinstance(arena, CpuArena)))
    print(f"  {layout.nbytes / 2**20:.0f} MiB: mapped in {(mapped - start) * 1e3:.1f} ms, "
          f"unpacked {len(packed.sources)} storages in {(time.perf_counter() - mapped) * 1e3:.1f} ms")  # fmt: skip
    os.close(fd)
    return result


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


# transformers


def bert() -> torch.nn.Module:
    import transformers

    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=4))


def ask_bert(model: Any) -> torch.Tensor:
    last_hidden_state: torch.Tensor = model(tokens(model, 128)).last_hidden_state
    return last_hidden_state


def gpt2() -> torch.nn.Module:
    import transformers

    config = transformers.GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=4, tie_word_embeddings=True)
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def ask_causal(model: Any) -> torch.Tensor:
    """Logits, and the tokens that are generated greedily."""
    prompt = tokens(model, 16)
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    return torch.cat([model(prompt).logits.flatten(), generated.flatten()])


def tokens(model: torch.nn.Module, length: int) -> torch.Tensor:
    return torch.arange(2 * length, device=device_of(model)).view(2, length) * 31 % 1000


# timm


def resnet() -> torch.nn.Module:
    import timm

    return timm.create_model("resnet50")


def vit() -> torch.nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", depth=2)


def ask_image_model(model: torch.nn.Module) -> torch.Tensor:
    images = torch.linspace(0, 1, 2 * 3 * 224 * 224, device=device_of(model)).view(2, 3, 224, 224)
    logits: torch.Tensor = model(images)
    return logits


# silero-vad: TorchScript with trained weights from its package, and a state


def silero() -> torch.nn.Module:
    threads = torch.get_num_threads()
    import silero_vad

    torch.set_num_threads(threads)  # its import sets one, for the whole process
    return silero_vad.load_silero_vad()


def ask_silero(model: Any) -> torch.Tensor:
    """The answers to a stream at either of its rates."""
    model.reset_states()
    chunks = audio(device_of(model))
    return torch.cat([model(chunk[:length], rate) for length, rate in ((512, 16000), (256, 8000)) for chunk in chunks])


def audio(device: torch.device) -> torch.Tensor:
    """A tone that rises and swells, in chunks."""
    seconds = torch.linspace(0, 0.64, 20 * 512, device=device)
    return ((seconds * (100 + 400 * seconds) * 6.28).sin() * (seconds * 30).sin()).view(20, 512)


MODELS = {
    "bert": Model(bert, ask_bert),
    "gpt2": Model(gpt2, ask_causal),
    "llama": Model(llama, ask_causal),
    "resnet": Model(resnet, ask_image_model),
    "vit": Model(vit, ask_image_model),
    "silero": Model(silero, ask_silero),
}
