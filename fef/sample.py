"""Text from a trained model, token by token."""

import jax
import jax.numpy as jnp
import numpy as np

from fef import sharding
from fef.config import Config, tokens_per_layer
from fef.layers import make_router
from fef.step import Stepper, TrainState
from fef.tokenizer import ByteTokenizer, Tokenizer

_TEMPERATURE = 0.8


def sample(
    stepper: Stepper, state: TrainState, num_tokens: int, prompt: bytes = b"\n", tokenizer: Tokenizer | None = None
) -> str:
    """Draws `num_tokens` tokens after `prompt`, deterministic for config.train.seed.

    The window is the training length; longer text slides through it. Capacity limits hold only where a scheme has them
    in evaluation.

    Args:
      stepper, state: of a trained model.
      num_tokens: how many; a token is a byte without a tokenizer.
      prompt: what the text goes on from; token 0 stands for one of which the tokenizer makes no token.
      tokenizer: of the text that the model was trained on; None is bytes.

    Returns:
      the text without the prompt, undecodable bytes replaced; or a line saying why there is none.
    """
    config = stepper.config
    if config.moe.every and not make_router(config).causal:
        return f"(none: router {config.moe.router} looks at later tokens)"
    tokenizer = tokenizer or ByteTokenizer()
    rows = stepper.mesh.size
    place = sharding.named(stepper.mesh, sharding.TOKENS)
    predict = jax.jit(
        lambda state, tokens, mask, at: stepper.logits(state, tokens, mask)[0, at, : tokenizer.vocab_size],
        out_shardings=sharding.named(stepper.mesh, sharding.REPLICATED),  # each host draws the token by itself
    )
    rng = np.random.default_rng(config.train.seed)
    [start], _ = tokenizer.encode([prompt])
    text = [int(token) for token in start] or [0]
    num_given = len(text)
    for _ in range(num_tokens):
        tokens_S, mask_S, at = _window(text, config)
        tokens_BS, mask_BS = (sharding.place(np.tile(a, (rows, 1)), place) for a in (tokens_S, mask_S))
        logits_V = np.asarray(predict(state, tokens_BS, mask_BS, jnp.int32(at)), np.float64)
        probs_V = np.exp((logits_V - logits_V.max()) / _TEMPERATURE)
        text.append(int(rng.choice(len(probs_V), p=probs_V / probs_V.sum())))
    return tokenizer.decode(text[num_given:])


def _window(text: list[int], config: Config) -> tuple[np.ndarray, np.ndarray, int]:
    """The end of the text as the model takes it: tokens (S,), mask (S,), and which of its predictions is the next one.

    With an encoder the text is cut into halves of windows: the decoder goes on with the last, the encoder has read the
    one before.
    """
    seq_len, predicted = config.data.seq_len, tokens_per_layer(config)
    tokens_S, mask_S = np.zeros(seq_len, np.int32), np.zeros(seq_len, bool)
    if predicted == seq_len:
        read, continued = [], text[-seq_len:]
    else:
        start = (len(text) - 1) // predicted * predicted
        read, continued = text[max(start - predicted, 0) : start], text[start:]
    for first, part in ((0, read), (seq_len - predicted, continued)):
        tokens_S[first : first + len(part)] = part
        mask_S[first : first + len(part)] = True
    return tokens_S, mask_S, len(continued) - 1
