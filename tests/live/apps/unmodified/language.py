"""Two models of transformers: an encoder, moved to the GPU, and one with tied weights that accelerate loads onto it."""

import os
from pathlib import Path

import flask
import telling
import torch
import transformers

telling.note_import()
models = Path(os.environ["MODELS"])
encoder = transformers.AutoModel.from_pretrained(models / "bert").to("cuda")
generator = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", device_map="cuda")

app = flask.Flask(__name__)


@app.post("/")
@torch.inference_mode()
def read_and_write() -> dict[str, object]:
    tokens = (torch.arange(8).view(1, 8) * flask.request.get_json() % 100).to(encoder.device)
    embedding = encoder(tokens).pooler_output
    mask = torch.ones_like(tokens)
    text = generator.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    parameters = [next(encoder.parameters()), generator.lm_head.weight]
    return telling.answer([embedding[0].tolist(), text[0].tolist()], tokens, mask, embedding, text, *parameters)
