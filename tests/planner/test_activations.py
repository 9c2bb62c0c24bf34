import dataclasses
from itertools import product

import pytest
import torch
import transformers
from conftest import grid
from datasets import Dataset
from peft import LoraConfig
from tiny import ARCHITECTURES
from torch.profiler import ProfilerActivity, profile

from dsft.config.options import TrainConfig
from dsft.data.batches import Collator
from dsft.models.chunked_head import VOCAB_TILE, ChunkedHead
from dsft.models.size import ModelSize, measure_model
from dsft.perplexity.scoring import score
from dsft.planner.activation_trace import fake_model, trace_model, trace_step
from dsft.planner.activations import activation_bytes

GQA = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS = {  # as in their published config.json
    "Llama-2-7b": transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    ),
    "Llama-3.1-8B": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        **GQA,
    ),
    "Llama-3.1-70B": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        **GQA,
    ),
    "Mistral-7B-v0.3": transformers.MistralConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        sliding_window=None,
        **GQA,
    ),
    "Qwen2.5-14B": transformers.Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        **GQA,
    ),
    "Qwen3-8B": transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        head_dim=128,
        **GQA,
    ),
    "Qwen3-32B": transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        head_dim=128,
        **GQA,
    ),
    "gemma-2-9b": transformers.Gemma2Config(
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        head_dim=256,
        **GQA,
    ),
    "gemma-3-27b": transformers.Gemma3TextConfig(
        vocab_size=262208,
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
    ),
    "Mixtral-8x7B-v0.1": transformers.MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        **GQA,
    ),
    "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
    ),
    "gpt2-xl": transformers.GPT2Config(
        n_embd=1600, n_layer=48, n_head=25, n_positions=8192
    ),  # published: 1,024 positions
}
EXPERTS = ("Mixtral-8x7B-v0.1", "Qwen3-30B-A3B")


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """ModelSize by name and method; two layers are built, which the counts of layers do not mind."""
    known = {}

    def size_of(name: str, model_config, method: str = "full") -> ModelSize:
        if (name, method) not in known:
            folder = tmp_path_factory.mktemp("config")
            two_layers = {"num_hidden_layers": 2} | (
                {"layer_types": model_config.layer_types[:2]} if hasattr(model_config, "layer_types") else {}
            )
            type(model_config).from_dict(model_config.to_dict() | two_layers).save_pretrained(folder)
            size = measure_model(TrainConfig(model=str(folder / "config.json"), method=method)).size
            known[name, method] = dataclasses.replace(size, num_layers=model_config.num_hidden_layers)
        return known[name, method]

    return size_of


def adapters_for(method: str) -> LoraConfig | None:
    return LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear") if method == "lora" else None


def check_formula(
    size: ModelSize, model_config, *, method: str, seq_len: int, half: bool = True, attention: str = "flash"
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    traced = trace_model(
        model_config, batch=1, seq_len=seq_len, dtype=dtype, attention=attention, adapters=adapters_for(method)
    )
    formula = activation_bytes(size, model_config, method=method, half=half, attention=attention, loss="hf")
    assert formula.source == f"formula of {model_config.model_type}"
    layers, n = size.num_layers, (seq_len, seq_len)
    pairs = {
        "saved": (
            formula.once.num_bytes(*n) + layers * formula.layer_saved.num_bytes(*n),
            traced.once + traced.layers_saved,
        ),
        "inputs": (
            formula.once.num_bytes(*n) + layers * formula.layer_input.num_bytes(*n),
            traced.once + traced.layers_input,
        ),
        "transient": (formula.layer_transient.num_bytes(*n), traced.layer_transient),
        "backward": (formula.layer_backward.num_bytes(*n), traced.layer_backward),
        "head": (formula.head.num_bytes(*n), traced.head),
        "forward": (formula.eval_backbone.num_bytes(*n), traced.forward),
        "peak": (formula.peak_bytes(*n, False), traced.peak_bytes(False)),
        "peak with checkpointing": (formula.peak_bytes(*n, True), traced.peak_bytes(True)),
    }
    off = {name: ours / real for name, (ours, real) in pairs.items() if abs(ours / real - 1) > 0.05}
    assert not off, off


QUICK = [
    ("Llama-2-7b", "full", 2048),
    ("Llama-3.1-8B", "lora", 8192),
    ("Mistral-7B-v0.3", "full", 8192),
    ("Qwen3-8B", "lora", 8192),
    ("gemma-2-9b", "full", 2048),
    ("gemma-3-27b", "lora", 8192),
    ("Mixtral-8x7B-v0.1", "full", 2048),
    ("Qwen3-30B-A3B", "full", 8192),
    ("gpt2-xl", "full", 2048),
]
"""Every kind of model once."""


@pytest.mark.parametrize(
    ("name", "method", "seq_len"),
    grid([(name, *rest) for name, rest in product(MODELS, [("full", 2048), ("full", 8192), ("lora", 8192)])], QUICK),
)
def test_formulas_give_what_the_trace_of_the_real_model_gives(sizes, name, method, seq_len):
    if method == "lora" and name in EXPERTS:
        pytest.skip("adapters of experts have no formula")
    check_formula(sizes(name, MODELS[name], method), MODELS[name], method=method, seq_len=seq_len)


@pytest.mark.parametrize(
    ("name", "half", "attention"),
    [
        ("Llama-3.1-8B", True, "sdpa"),
        ("Qwen3-8B", False, "flash"),
        ("gemma-3-27b", True, "sdpa"),
        ("Mixtral-8x7B-v0.1", False, "sdpa"),
    ],
)
def test_formulas_hold_with_a_mask_and_in_fp32(sizes, name, half, attention):
    check_formula(sizes(name, MODELS[name]), MODELS[name], method="full", seq_len=2048, half=half, attention=attention)


UNLIKE_LAYERS = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "model_config",
    [
        transformers.Gemma3TextConfig(**UNLIKE_LAYERS, num_hidden_layers=9, num_key_value_heads=2, head_dim=16),
        transformers.DeepseekV3Config(
            **UNLIKE_LAYERS,
            num_hidden_layers=5,
            num_key_value_heads=4,
            first_k_dense_replace=3,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=4,
            n_group=2,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    ],
    ids=["gemma3", "deepseek_v3"],
)
def test_few_layers_tell_of_many(model_config):
    extrapolated = trace_model(model_config, batch=2, seq_len=512, dtype=torch.bfloat16, attention="flash")
    for checkpointing in (False, True):
        with fake_model(model_config, dtype=torch.bfloat16, attention="flash", checkpointing=checkpointing) as model:
            whole = trace_step(model, batch=2, seq_len=512, attention="flash")
        assert extrapolated.peak_bytes(checkpointing) == pytest.approx(
            whole.kept + max(whole.head, whole.layers), rel=0.01
        )


def test_what_has_no_formula_is_traced_and_exact_at_the_asked_length(sizes):
    cases = {"gpt_neox": ("full", "flash"), "llama": ("full", "eager"), "mixtral": ("lora", "flash")}
    for architecture, (method, attention) in cases.items():
        cls, values = ARCHITECTURES[architecture]
        model_config = cls(**(values | {"vocab_size": 2000}))
        found = activation_bytes(
            sizes(architecture, model_config, method),
            model_config,
            method=method,
            half=True,
            attention=attention,
            loss="hf",
            seq_len=512,
        )
        traced = trace_model(
            model_config, batch=1, seq_len=512, dtype=torch.bfloat16, attention=attention, adapters=adapters_for(method)
        )
        assert found.source == "fake-tensor trace"
        assert (found.layer_saved.per_pair > 0) == (attention == "eager")
        for checkpointing in (False, True):
            assert found.peak_bytes(512, 512, checkpointing) == pytest.approx(
                traced.peak_bytes(checkpointing), rel=0.001
            )


def test_terms_add_up_and_show_their_numbers(sizes):
    found = activation_bytes(
        sizes("Llama-3.1-8B", MODELS["Llama-3.1-8B"]),
        MODELS["Llama-3.1-8B"],
        method="full",
        half=True,
        attention="flash",
        loss="hf",
    )
    terms = found.terms(8192, 4096, True)
    assert sum(term.num_bytes for term in terms) == found.peak_bytes(8192, 4096, True)
    assert {(term.phase, term.place) for term in terms} == {("compute", "device")}
    assert "32 layers x (8,192 tokens x 8,192 B)" in [term.formula for term in terms]
    fused = activation_bytes(
        sizes("Llama-3.1-8B", MODELS["Llama-3.1-8B"]),
        MODELS["Llama-3.1-8B"],
        method="full",
        half=True,
        attention="flash",
        loss="fused",
    )
    assert fused.head.num_bytes(8192, 8192) < found.head.num_bytes(8192, 8192) / 10
    assert fused.terms(8192, 8192, True)[-1].name == "backward of one layer"


SMALL = {
    "vocab_size": 3000,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def real_model(attention: str, *, checkpointing: bool = False, dtype: torch.dtype = torch.float32, **changes):
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**(SMALL | changes)), attn_implementation=attention, dtype=dtype
    )
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def allocator_peak(run) -> int:
    """Most bytes that torch's CPU allocator had handed out at once during `run()`: everything, inside operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = peak = 0
    for event in sorted(
        (e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


SHAPES = [
    (*peak, checkpointing, dtype)
    for peak, checkpointing, dtype in product(
        [(3000, "head"), (64, "layers")], [False, True], [torch.float32, torch.bfloat16]
    )
]


@pytest.mark.parametrize(
    ("vocab_size", "peak_lies_in", "checkpointing", "dtype"),
    grid(
        SHAPES,
        [
            (3000, "head", True, torch.bfloat16),
            (64, "layers", False, torch.float32),
            (64, "layers", True, torch.bfloat16),
        ],
    ),
)
def test_fake_tensors_live_and_die_as_real_ones_do(vocab_size, peak_lies_in, checkpointing, dtype):
    shape = {"batch": 2, "seq_len": 256, "attention": "eager"}
    ids_BT = torch.zeros(2, 256, dtype=torch.long)
    with fake_model(
        transformers.LlamaConfig(**(SMALL | {"vocab_size": vocab_size})),
        dtype=dtype,
        attention="eager",
        checkpointing=checkpointing,
    ) as model:
        fake = trace_step(model, **shape)
    assert (fake.head > fake.layers) == (peak_lies_in == "head")
    model = real_model("eager", checkpointing=checkpointing, dtype=dtype, vocab_size=vocab_size)
    assert trace_step(model, **shape) == fake
    measured = allocator_peak(
        lambda: model(
            input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), labels=ids_BT, use_cache=False
        ).loss.backward()
    )
    traced = fake.kept + max(fake.head, fake.layers)
    # The allocator counts gradients too: when the last layer's backward is at its peak, at most the head's and that
    # layer's are there.
    # And copies that a CPU kernel makes for itself: in attention's products, one operand.
    gradients = (
        sum(
            p.numel()
            for module in (model.lm_head, model.model.norm, model.model.layers[-1])
            for p in module.parameters()
        )
        * dtype.itemsize
    )
    assert (
        0.995 * traced
        < measured
        < (1.005 if peak_lies_in == "head" else 1.02) * traced + (gradients if peak_lies_in == "layers" else 0)
    )


def test_the_trainer_holds_no_more_than_the_trace_says(tmp_path):
    """12 V bytes per token for the loss, not 14 V: transformers' Trainer has dropped the logits when the backward
    starts.
    """
    peaks = []

    class Measured(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = []
            peaks.append(allocator_peak(lambda: loss.append(super(Measured, self).training_step(*args, **kwargs))))
            return loss[0]

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    sequences = Dataset.from_list([{"input_ids": [1] * 256, "labels": [1] * 256}] * 4)
    Measured(model=real_model("eager"), args=arguments, train_dataset=sequences, data_collator=Collator(0)).train()
    with fake_model(transformers.LlamaConfig(**SMALL), dtype=torch.float32, attention="eager") as model:
        fake = trace_step(model, batch=2, seq_len=256, attention="eager")
    assert peaks == [pytest.approx(fake.kept + fake.head, rel=0.005)] * 2


def test_saved_bytes_are_what_autograd_packs_of_a_real_run():
    """torch's own CPU attention kernel, counted by torch's own hooks: nothing of trace.py takes part."""
    model, storages = real_model("sdpa"), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids_BT = torch.zeros(1, 512, dtype=torch.long)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False)
    saved = sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in weights)
    traced = trace_model(
        transformers.LlamaConfig(**SMALL), batch=1, seq_len=512, dtype=torch.float32, attention="flash"
    )
    head = 512 * (4 * 3000 + 3 * 4 * 64)  # log-softmax; input, normalised and output of the last norm
    assert saved == pytest.approx(traced.once + traced.layers_saved + head, rel=0.01)


def test_evaluation_takes_what_is_predicted(sizes):
    model_config = transformers.LlamaConfig(**SMALL)
    model = real_model("sdpa").eval()
    ids_BT = torch.randint(3000, (8, 512))
    found = activation_bytes(
        sizes("small", model_config), model_config, method="full", half=False, attention="flash", loss="hf"
    )
    predicted = found.eval_peak_bytes(ids_BT.numel(), 512, "cpu")
    with torch.no_grad():
        head = ChunkedHead(model, VOCAB_TILE["cpu"])
        measured = allocator_peak(lambda: score(head, {"input_ids": ids_BT, "targets": ids_BT}))
    assert predicted == pytest.approx(measured, rel=0.1)
