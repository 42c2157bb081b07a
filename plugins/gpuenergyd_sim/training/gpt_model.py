"""The demo's model and data: a small GPT divided into stages, reproducible from one seed.

The real model is tiny, so that its computation fits into a simulated instruction; on simulated GPUs its stages have the
time and energy of a large model. `simulated_works` divides 24 layers and an output head, as in GPT-3 1.3B. The head
(50,257 x 2,048 weights) costs about as much as two layers (12 x 2,048^2 each), layers cannot be split, and the
embedding is only a look-up. The most even division into four stages is therefore 6, 7, 6 and 5 layers with the head,
and the slowest stage takes 1.17 times as long as the fastest.
"""

import torch
from torch import nn
from torch.nn import functional

from gpuenergyd.count_text import count_text
from gpuenergyd_sim.driver.host import InstructionWork

VOCABULARY = 128
_WIDTH = 32
_NUM_HEADS = 2
SEQUENCE_TOKENS = 16
SEQUENCES_PER_MICROBATCH = 2

_SIMULATED_LAYERS = 24
_HEAD_IN_LAYERS = 50_257 * 2_048 / (12 * 2_048**2)
# A stage of GPT-3 175B on A100 at 1410 MHz (the published Perseus profile): 50.16 ms forward, 92.95 ms backward.
# Shares of time inversely proportional to the clock: fitted to the same profile at 1110 and 990 MHz (times 1.203 and
# 1.345 forward, 1.185 and 1.320 backward). Watts per MHz: the device model then matches that profile's energies within
# 4 %.
_FORWARD_S, _FORWARD_COMPUTE_SHARE, _FORWARD_W_PER_MHZ = 0.05016, 0.795, 0.265
_BACKWARD_S, _BACKWARD_COMPUTE_SHARE, _BACKWARD_W_PER_MHZ = 0.09295, 0.734, 0.29


class GptStage(nn.Module):
    """One stage: a transformer block, with the embedding on the first stage and the output head on the last."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, _WIDTH) if is_first else None
        self.positions = nn.Embedding(SEQUENCE_TOKENS, _WIDTH) if is_first else None
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (batch, tokens, width), or logits on the last stage."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(SEQUENCE_TOKENS))
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3 * _NUM_HEADS, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))
        x = x + self.mlp(x)
        return x if self.head is None else self.head(x)


def build_stage(stage_index: int, num_stages: int, *, seed: int) -> GptStage:
    """Return a stage with initial weights that depend on the seed and the stage only."""
    torch.manual_seed(seed * 1_000 + stage_index)
    return GptStage(is_first=stage_index == 0, is_last=stage_index == num_stages - 1)


def make_batch(iteration_index: int, num_microbatches: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one iteration: regular sequences that the model can learn."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + iteration_index)
    size = (num_microbatches * SEQUENCES_PER_MICROBATCH, 1)
    start = torch.randint(VOCABULARY, size, generator=generator)
    step = torch.randint(1, 4, size, generator=generator)
    tokens = (start + step * torch.arange(SEQUENCE_TOKENS + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token."""
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def layers_per_stage(num_stages: int) -> tuple[float, ...]:
    """Return the cost of each stage in layers, head included, for the most even division.

    Among divisions whose ratio of slowest to fastest stage is equal to a hundredth, it has the heaviest last stage.
    """
    if num_stages == 1:
        return (_SIMULATED_LAYERS + _HEAD_IN_LAYERS,)
    cuts = []
    for last in range(_SIMULATED_LAYERS):
        few, num_more = divmod(_SIMULATED_LAYERS - last, num_stages - 1)
        front = [few] * (num_stages - 1 - num_more) + [few + 1] * num_more
        if few > 0:
            cuts.append((*map(float, front[:1] + front[:0:-1]), last + _HEAD_IN_LAYERS))
    if not cuts:
        raise ValueError(
            f"{count_text(num_stages, 'stage')} are too many for {_SIMULATED_LAYERS} layers; the maximum is"
            f" {_SIMULATED_LAYERS + 1}"
        )
    return min(cuts, key=lambda cut: (round(max(cut) / min(cut), 2), -cut[-1]))


def simulated_works(
    stage_index: int, num_stages: int, *, num_ranks: int | None = None, duration_scale: float = 1.0
) -> dict[str, InstructionWork]:
    """Return the work of each kind of instruction of a stage on a simulated A100.

    Averaged over the ranks, a rank's stages together take as long as one stage of GPT-3 175B on eight GPUs. Input and
    weight gradients take half of the full backward each, as their matrix products are equal.
    """
    layers_per_rank = (_SIMULATED_LAYERS + _HEAD_IN_LAYERS) / (num_ranks or num_stages)
    scale = layers_per_stage(num_stages)[stage_index] / layers_per_rank * duration_scale
    backward = _work(_BACKWARD_S * scale, _BACKWARD_COMPUTE_SHARE, _BACKWARD_W_PER_MHZ)
    half = _work(_BACKWARD_S * scale / 2, _BACKWARD_COMPUTE_SHARE, _BACKWARD_W_PER_MHZ)
    forward = _work(_FORWARD_S * scale, _FORWARD_COMPUTE_SHARE, _FORWARD_W_PER_MHZ)
    return {"F": forward, "B": backward, "I": half, "W": half}


def _work(time_s: float, compute_share: float, w_per_mhz: float) -> InstructionWork:
    return InstructionWork(
        memory_time_s=time_s * (1 - compute_share),
        compute_time_s=time_s * compute_share,
        power_coefficient_w_per_mhz=w_per_mhz,
    )
