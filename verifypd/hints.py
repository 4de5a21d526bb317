"""What to say about a name that is not one of ours: the nearest that is, or ours for one of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

# vLLM's name of a setting -> what does that here. Our own names stand in braces: a program and a terminal spell them
# differently.
VLLM: dict[str, str] = {
    "gpu_memory_utilization": "{kv_memory} is the size of the KV blocks, such as 2GB; by default 0.9 of a GPU is used",
    "kv_cache_memory_bytes": "use {kv_memory}",
    "num_gpu_blocks_override": "use {kv_memory}",
    "max_num_seqs": "use {batch_size}",
    "max_num_batched_tokens": "use {batch_size} for requests and {prefill_chunk} for prompt tokens in one pass",
    "enable_chunked_prefill": "prompts are always read in chunks; {prefill_chunk} is their size",
    "enable_prefix_caching": "use {prefix_cache}, which is on",
    "no_enable_prefix_caching": "use {prefix_cache}, and turn it off",
    "speculative_config": "use {draft} for the draft model, or 'ngram', and {max_draft} for the tokens of a draft",
    "speculative_model": "use {draft}",
    "num_speculative_tokens": "use {max_draft}",
    "prompt_lookup_max": "use {ngram_max}",
    "prompt_lookup_min": "use {ngram_min}",
    "ngram_prompt_lookup_max": "use {ngram_max}",
    "ngram_prompt_lookup_min": "use {ngram_min}",
    "enforce_eager": "use {graphs} with the value off",
    "compilation_config": "use {graphs}",
    "max_seq_len_to_capture": "use {graphs}",
    "attention_backend": "use {attention}",
    "scheduling_policy": "every request has a priority of its own; leave it out",
    **dict.fromkeys(
        ("pipeline_parallel_size", "distributed_executor_backend"),
        "{tensor_parallel_size} divides a model among devices; leave it out",
    ),
    "data_parallel_size": "`verifypd deploy --replicas` runs several engines; leave it out",
    **dict.fromkeys(("swap_space", "cpu_offload_gb"), "nothing is moved off the device here; leave it out"),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision"), "the tokenizer comes with the model; leave it out"
    ),
    "trust_remote_code": "no code that comes with a model is run; leave it out",
    "download_dir": "models lie in the hub's own cache; set HF_HOME instead",
    "enable_lora": "there is no LoRA here; leave it out",
    **dict.fromkeys(
        ("enable_auto_tool_choice", "tool_call_parser"), "tools work as the chat template says; leave it out"
    ),
    **dict.fromkeys(
        ("chat_template", "chat_template_content_format", "response_role"),
        "the chat template comes with the model's folder; leave it out",
    ),
    "override_generation_config": "send these values in the requests; leave it out",
    **dict.fromkeys(("reasoning_parser", "enable_reasoning"), "an answer has the model's text as it is; leave it out"),
    **dict.fromkeys(
        ("enable_log_requests", "disable_log_requests", "disable_log_stats"),
        "every request is one line of the log, and figures are at /metrics; leave it out",
    ),
    **dict.fromkeys(
        ("uvicorn_log_level", "disable_uvicorn_access_log"), "every request is one line of the log; leave it out"
    ),
    **dict.fromkeys(("lora_modules", "max_loras", "max_lora_rank"), "there is no LoRA here; leave it out"),
    **dict.fromkeys(
        ("guided_decoding_backend", "structured_outputs_config"), "llguidance follows output formats; leave it out"
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_theta", "hf_overrides"), "the model's config.json says it; edit that, and leave it out"
    ),
    **dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs"), "models read text only here; leave it out"),
    **dict.fromkeys(("enable_prompt_tokens_details", "enable_request_id_headers"), "that is always on; leave it out"),
    "max_logprobs": "a request may ask for 20 at most; leave it out",
    "root_path": "let the proxy strip the prefix; leave it out",
    "api_server_count": "`verifypd serve --api-workers` sets it",
    "kv_transfer_config": "{placement} puts lanes into processes of their own; leave it out",
    "tp": "use {tensor_parallel_size}",
}


def advice(name: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """What follows the word that a name is unknown; empty where there is nothing to say. `show` spells our names."""
    plain = name.lstrip("-").replace("-", "_")
    if plain in VLLM:
        return f"; it is vLLM's: {VLLM[plain].format_map(_Spelled(show))}"
    known = list(known)
    near = get_close_matches(plain, known, n=1) or [name for name in known if name.endswith(f"_{plain}")]
    return f"; did you mean {show(near[0])}?" if near else ""


class _Spelled(dict[str, str]):
    """Every name, as `show` spells it."""

    def __init__(self, show: Callable[[str], str]) -> None:
        super().__init__()
        self.show = show

    def __missing__(self, name: str) -> str:
        return self.show(name)
