"""Real vLLM engines in processes of their own, and the part of the proxy between two of them.

An engine is a child process that holds a `vllm.LLM`, which has two more processes: its scheduler
and its worker. The test says what to generate and gets tokens, the reason why they ended, and the
parameters that one engine wants handed to the other.
"""

import contextlib
import functools
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from peers import Peer
from ports import free_port

from pynixlkv.testing.process import RunError

VOCABULARY = 1024
LENGTHS = (5, 40, 300)
MAX_TOKENS = 16
START_S = 900.0
ANSWER_S = 120.0

# What a proxy sends to the prefill engine.
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Connector:
    """A connector as vLLM's configuration names it, and the environment of its engines."""

    name: str
    module: str | None = None
    extra: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    policy: str = "fail"

    def with_(self, **changes):
        """The same with other fields; dictionaries are merged into what is there."""
        for key in ("extra", "env"):
            if key in changes:
                changes[key] = {**getattr(self, key), **changes[key]}
        return replace(self, **changes)

    def config(self, role):
        """vLLM's ``kv_transfer_config``."""
        config = {
            "kv_connector": self.name,
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": self.extra,
        }
        if self.module is not None:
            config["kv_connector_module_path"] = self.module
        return config


@dataclass(frozen=True)
class Answer:
    """What an engine made of one prompt."""

    tokens: list
    finish: str
    params: dict | None
    seconds: float


def make_prompts(lengths, seed):
    """Random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


# ---- in the child

_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # With the usual 0.02 the last token alone decides what comes next.
    "initializer_range": 0.1,
}

# The names of a model's classes in transformers, without their endings, and its settings.
MODELS = {
    "llama": ("Llama", "Llama", {"num_hidden_layers": 3, "tie_word_embeddings": False}),
    # Latents of the one size that the CPU's kernel knows, and no experts.
    "deepseek": (
        "DeepseekV2",
        "DeepseekV2",
        {
            "num_key_value_heads": 8,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 3,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "tie_word_embeddings": False,
        },
    ),
    # Every other layer sees a window only: two groups, each with a block table of its own.
    "gemma": (
        "Gemma3Text",
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "pad_token_id": 0,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # Layers with a window have 4 KV heads, the others 2 of twice the size.
    "gemma4": (
        "Gemma4Text",
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "pad_token_id": 0,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # Attention within chunks of tokens, but for every other layer.
    "llama4": (
        "Llama4Text",
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size_mlp": 512,
            "interleave_moe_layer_step": 5,
            "moe_layers": [],
            "num_local_experts": 2,
            "attention_chunk_size": 128,
            "no_rope_layers": [1, 0] * 2,
            "pad_token_id": 0,
        },
    ),
    # Gated delta nets: vLLM wants heads of 128 and a layer of experts. One expert would be a step.
    "qwen3-next": (
        "Qwen3Next",
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
    ),
    # One layer of attention among layers with state; every rank has B and C of the one group.
    "mamba2": (
        "GraniteMoeHybrid",
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "position_embedding_type": "rope",
            "mamba_n_heads": 16,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_expand": 2,
            "pad_token_id": 0,
        },
    ),
}


def write_model(channel, kind, path):
    """Write a small model with random weights, whose greedy tokens depend on the whole prompt."""
    import torch
    import transformers

    torch.manual_seed(0)
    of_config, of_model, settings = MODELS[kind]
    config = getattr(transformers, f"{of_config}Config")(**{**_SHAPE, **settings})
    model = getattr(transformers, f"{of_model}ForCausalLM")(config)
    model.to(torch.float32).save_pretrained(path)
    write_tokenizer(path)


def write_tokenizer(path):
    """Write a tokenizer beside a model, since servers want one: token 7 reads t7."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(path)


def run_engine(channel, options):
    """Make an engine and answer until told to stop."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        seed=0,
        disable_log_stats=False,
        **options,
    )
    channel.send("ready")
    while (request := channel.receive(timeout=None)) is not None:
        if request == "metrics":
            channel.send(read_metrics(llm))
            continue
        if isinstance(request, list) and request[0] == "judge":
            channel.send(judge(llm, *request[1:]))
            continue
        started = time.monotonic()
        prompts, sampling = [], []
        for tokens, max_tokens, params in request:
            prompts.append({"prompt_token_ids": tokens})
            sampling.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=None if params is None else {"kv_transfer_params": params},
                )
            )
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - started
        channel.send(
            [
                (
                    list(output.outputs[0].token_ids),
                    output.outputs[0].finish_reason,
                    output.kv_transfer_params,
                    seconds,
                )
                for output in outputs
            ]
        )
    return "stopped"


def judge(llm, prompt, tokens):
    """How much less likely, in logarithms, each token is than the likeliest one in its place."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    whole = {"prompt_token_ids": prompt + tokens}
    (output,) = llm.generate([whole], sampling, use_tqdm=False)
    places = output.prompt_logprobs[len(prompt) :]
    return [
        max(found.logprob for found in place.values()) - place[token].logprob
        for place, token in zip(places, tokens, strict=True)
    ]


def read_metrics(llm):
    """vLLM's counters and sums by name, with the source where there is one."""
    values = {}
    for metric in llm.get_metrics():
        source = metric.labels.get("source")
        key = f"{metric.name}[{source}]" if source else metric.name
        number = getattr(metric, "value", getattr(metric, "sum", None))
        if number is not None:
            values[key] = values.get(key, 0) + number
    return values


# ---- in the test


def environment(connector=None):
    """What the processes of an engine find in their environment."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Otherwise every engine pins its threads to the first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        **(connector.env if connector else {}),
    }


class Engine:
    """One engine. `log` is the file with what its processes print."""

    def __init__(self, name, model, folder, connector=None, role="kv_both", **options):
        self.name = name
        self.log = Path(folder) / f"{name}.log"
        env = environment(connector)
        if "PYNIXLKV_TEST_CARD" in os.environ:
            options.setdefault("gpu_memory_utilization", 0.25)
        options = {"model": str(model), "dtype": "float32", **options}
        if connector is not None:
            options["kv_transfer_config"] = connector.config(role)
        with self.log.open("wb") as log:
            self._peer = Peer(
                run_engine,
                options,
                env=env,
                deadline_s=3600.0,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def group(self):
        """Number of its process group."""
        return self._peer.process.pid

    def wait_until_ready(self):
        """Wait for the end of its start."""
        assert self._receive(START_S) == "ready"
        return self

    def start_generating(self, prompts, max_tokens=MAX_TOKENS, params=None):
        """Hand it prompts; `answers` waits for what comes of them."""
        every = params if isinstance(params, list) else [params] * len(prompts)
        self._peer.send([(p, max_tokens, q) for p, q in zip(prompts, every, strict=True)])

    def answers(self, timeout=ANSWER_S):
        """Wait for the answers to all prompts."""
        return [Answer(*answer) for answer in self._receive(timeout)]

    def generate(self, prompt, max_tokens=MAX_TOKENS, params=None, timeout=ANSWER_S):
        """Answer one prompt."""
        self.start_generating([prompt], max_tokens, params)
        (answer,) = self.answers(timeout)
        return answer

    def prefill(self, prompt):
        """Prefill a prompt; returns the parameters for the decode engine."""
        answer = self.generate(prompt, max_tokens=1, params=PREFILL_PARAMS)
        assert answer.params, f"{self.name} gave no parameters for the decode engine"
        return answer.params

    def judge(self, prompt, tokens):
        """How much less likely, in logarithms, each token is than the likeliest one."""
        self._peer.send(["judge", prompt, tokens])
        return self._receive(ANSWER_S)

    def metrics(self):
        """vLLM's counters."""
        self._peer.send("metrics")
        return self._receive(ANSWER_S)

    def libraries(self):
        """File names of the shared libraries that its processes have loaded."""
        names = set()
        for pid in self.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                names |= {Path(line.split(maxsplit=5)[5]).name for line in lines if "/" in line}
        return names

    def pids(self):
        """Process ids of its group."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(entry.name)) == self.group:
                    found.append(int(entry.name))
        return found

    def connections(self):
        """Its TCP connections: (own address, other address, bytes that were not read yet)."""
        inodes = set()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for fd in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
        found = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                established = columns[3] == "01"
                if established and columns[9] in inodes:
                    unread = int(columns[4].partition(":")[2], 16)
                    found.append((columns[1], columns[2], unread))
        return found

    def unread_bytes(self, sender):
        """Bytes that have come from another engine and were not read yet."""
        theirs = {own for own, _, _ in sender.connections()}
        return sum(unread for _, other, unread in self.connections() if other in theirs)

    def freeze(self):
        """Stop all of its processes, and wait until every thread stands still."""
        self._signal(signal.SIGSTOP)
        tasks = [task for pid in self.pids() for task in Path(f"/proc/{pid}/task").iterdir()]

        def is_still(task):
            # The state comes after the name, which is in parentheses and may hold anything.
            return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"

        wait_for(lambda: all(map(is_still, tasks)), "the stop of every thread")

    def thaw(self):
        """Let its processes go on."""
        self._signal(signal.SIGCONT)

    def kill(self):
        """Kill all of its processes."""
        self._signal(signal.SIGKILL)
        self._peer.process.wait(60)

    def close(self):
        """Let it end by itself, and kill it if it does not."""
        with contextlib.suppress(OSError, RunError, AssertionError):
            self._peer.send(None)
            self._peer.finish(30.0)
        self.kill()
        self._peer.kill()

    def _signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def _receive(self, timeout):
        try:
            return self._peer.receive(timeout)
        except RunError as error:
            lines = self.log.read_text(errors="replace").splitlines()[-40:]
            raise AssertionError(
                f"engine {self.name}: {type(error).__name__} {error}\n" + "\n".join(lines)
            ) from error


class Cluster:
    """Engines on one model, all closed at the end."""

    def __init__(self, model, folder):
        self.model = model
        self.folder = folder
        self.engines = []

    def start(self, name, connector=None, role="kv_both", **options):
        """Start an engine and wait until it is ready: vLLM sizes its cache by what is free."""
        label = f"{len(self.engines)}-{name}"
        engine = Engine(label, self.model, self.folder, connector, role, **options)
        self.engines.append(engine)
        return engine.wait_until_ready()

    prefill = functools.partialmethod(start, "prefill", role="kv_producer")
    decode = functools.partialmethod(start, "decode", role="kv_consumer")

    def close(self):
        """End all engines."""
        for engine in reversed(self.engines):
            engine.close()


def make_model(kind, path):
    """Write a model in a process of its own; returns its folder."""
    writer = Peer(write_model, kind, str(path))
    try:
        writer.finish(120.0)
    finally:
        writer.kill()
    return path


def answer_plainly(model, folder, **options):
    """Prompts by length, and the tokens that an engine without a connector makes of them."""
    cluster = Cluster(model, folder)
    try:
        plain = cluster.start("plain", **options)
        prompts = make_prompts(LENGTHS, 1)
        plain.start_generating(prompts)
        answers = plain.answers()
    finally:
        cluster.close()
    return {len(p): (p, a.tokens) for p, a in zip(prompts, answers, strict=True)}


def wait_for(condition, what, timeout=60.0, interval=0.01):
    """Look until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(interval)
