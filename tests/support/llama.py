"""Published configurations of Llama 3, by the names that transformers gives their fields."""

from typing import Any


def rope_parameters(factor: float) -> dict[str, Any]:
    """Return RoPE's parameters; Llama 3.1 and 3.2 differ in the factor alone."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


COMMON: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "1b": {
        **COMMON,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "rope_parameters": rope_parameters(32.0),
        "tie_word_embeddings": True,
    },
    "3b": {
        **COMMON,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "rope_parameters": rope_parameters(32.0),
        "tie_word_embeddings": True,
    },
    "8b": {
        **COMMON,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rope_parameters": rope_parameters(8.0),
        "tie_word_embeddings": False,
    },
}
