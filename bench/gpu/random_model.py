"""A model of published sizes with random weights: its text is noise, its steps take the real one's time."""

import types

import torch

from esp_decode.model import Layer, Linear, Model
from esp_decode.roofline import Shape

ROPE_BASE = 500_000.0


def random_model(shape: Shape, dtype: torch.dtype, device: str, context: int, seed: int = 0) -> Model:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*dims: int, std: float) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device).normal_(0.0, std, generator=generator)

    def linear(inputs: int, outputs: int) -> Linear:
        return Linear(normal(outputs, inputs, std=inputs**-0.5))

    def norm() -> torch.Tensor:
        return 1 + normal(hidden, std=0.1)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    layers = [
        Layer(
            attention_norm=norm(),
            qkv=linear(hidden, q + 2 * kv),
            q_norm=None,
            k_norm=None,
            output=linear(q, hidden),
            mlp_norm=norm(),
            gate_up=linear(hidden, 2 * inner),
            down=linear(inner, hidden),
            window=None,
        )
        for _ in range(shape.num_hidden_layers)
    ]
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    return Model(
        config=types.SimpleNamespace(**vars(shape), rms_norm_eps=1e-5, max_position_embeddings=context),
        embedding=normal(shape.vocab_size, hidden, std=1.0),
        layers=layers,
        norm=norm(),
        lm_head=linear(hidden, shape.vocab_size),
        inverse_frequencies=ROPE_BASE**-powers,
        rope_scale=1.0,
        eos_token_ids=frozenset(),
    )
