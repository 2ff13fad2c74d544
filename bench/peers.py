"""Other CPU engines on the engine benchmark's workload: vLLM's CPU build and llama.cpp's server.

Neither is a dependency of this project. vLLM runs this file as a script with the interpreter of its
own environment, so nothing of ours is imported at the top; llama.cpp runs its server's binary on a
checkpoint in its format, for which the `gguf` package must be importable by the interpreter of
`--llama-python`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0  # seconds: vLLM compiles on its first start
OUTPUT_MARK = "PEER-RESULT "


class PeerMissing(Exception):
    """Another engine cannot be started. The message names its option."""


def vllm_version(python: Path) -> str:
    """Ask an environment for its version of vLLM. Raises: PeerMissing."""
    program = "from vllm import LLM, __version__; print(__version__)"
    return _answer("--vllm-python", [str(python), "-c", program]).splitlines()[-1]


def llama_cpp_version(server: Path, python: Path) -> str:
    """Ask llama.cpp's server for its version, and check that `python` has `gguf`.

    Raises: PeerMissing.
    """
    _answer("--llama-python", [str(python), "-c", "import gguf"])
    return _answer("--llama-server", [str(server), "--version"]).partition("\n")[0]


def _answer(option: str, command: list[str]) -> str:
    """Run a command and return its output. Raises: PeerMissing naming the option.

    It runs outside the repository, whose packages must not hide others.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=tempfile.gettempdir(),
        )
    except OSError as error:
        raise PeerMissing(f"{option}: {error}") from error
    if ended.returncode != 0:
        raise PeerMissing(f"{option}: {' '.join(command)} failed:\n{ended.stdout[-2000:]}")
    return ended.stdout.strip()


def measure_vllm(
    python: Path, checkpoint: Path, precision: str, work: dict[str, Any], thread_count: int
) -> dict[str, float]:
    """Run `_drive_vllm` with vLLM's interpreter. `work` comes from `bench.engine.peer_work`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"checkpoint": str(checkpoint), "precision": precision} | work, file)
        file.flush()
        command = [str(python), str(Path(__file__).resolve()), file.name]
        # Outside the repository, whose packages must not shadow those of vLLM.
        ended = subprocess.run(
            command,
            env=_vllm_environment(thread_count),
            capture_output=True,
            text=True,
            check=False,
            cwd=tempfile.gettempdir(),
        )
    for line in ended.stdout.splitlines():
        if line.startswith(OUTPUT_MARK):
            result: dict[str, float] = json.loads(line.removeprefix(OUTPUT_MARK))
            return result
    raise RuntimeError(f"vLLM gave no result:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")


def measure_llama_cpp(
    server: Path,
    python: Path,
    checkpoint: Path,
    precision: str,
    work: dict[str, Any],
    thread_count: int,
) -> dict[str, float]:
    """Start llama.cpp's server with a slot for every request, and send it the workload.

    The checkpoint is converted to its file format on the first run.
    """
    model = checkpoint / f"{precision}.gguf"
    if not model.exists():
        subprocess.run(
            [str(python), str(Path(__file__).resolve()), "--gguf", str(checkpoint), str(model)],
            check=True,
        )
    sequence_count, port = len(work["workload"]), free_port()
    context = sequence_count * (len(work["workload"][0]) + work["output_tokens"] + 16)
    threads = str(thread_count)
    cache_type = {"bfloat16": "f16", "float32": "f32"}[precision]
    options = [
        *("-np", str(sequence_count), "-c", str(context), "-t", threads, "-tb", threads),
        *("-ctk", cache_type, "-ctv", cache_type, "--no-warmup", "-ub", "512"),
        *("--port", str(port), "--log-disable"),
    ]
    begin_s = time.perf_counter()
    with _running([str(server), "-m", str(model), *options]):
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, begin_s, "llama.cpp's server")

        def ask(prompt: list[int], count: int) -> float:
            body = {
                "prompt": prompt,
                "n_predict": count,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,
            }
            sent_s = time.perf_counter()
            request = urllib.request.Request(
                f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=3600) as answer:
                got = json.load(answer)["tokens_predicted"]
            if got != count:
                raise RuntimeError(f"llama.cpp generated {got} tokens instead of {count}")
            return time.perf_counter() - sent_s

        ask(work["first"], 1)
        measured = {"first_token_s": time.perf_counter() - begin_s}
        measured |= _alone(ask, work)
        with ThreadPoolExecutor(sequence_count) as pool:
            begin_s = time.perf_counter()
            list(pool.map(lambda prompt: ask(prompt, work["output_tokens"]), work["workload"]))
            total_s = time.perf_counter() - begin_s
    return measured | {"output_tokens_per_s": sequence_count * work["output_tokens"] / total_s}


def _alone(ask: Any, work: dict[str, Any]) -> dict[str, float]:
    """Measure decoding of one request alone, and the time to its first token, cold and warm."""
    measured = {}
    for name in ("short", "long"):
        ask(work[name], 1)
        one_s, many_s = ask(work[name], 1), ask(work[name], 65)
        measured[f"decode_{name}_tokens_per_s"] = 64 / (many_s - one_s)
    measured["ttft_cold_ms"] = ask(work["cold"], 1) * 1e3
    measured["ttft_warm_ms"] = ask(work["warm"], 1) * 1e3
    return measured


@contextmanager
def vllm_serving(
    python: Path, checkpoint: Path, precision: str, name: str, thread_count: int, *options: str
) -> Iterator[str]:
    """Serve a checkpoint under the model name `name` by vLLM over HTTP, and yield host:port."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={checkpoint}"]
    command += [f"--served-model-name={name}", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--dtype={precision}", "--max-model-len=2048", "--max-num-seqs=64"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *options]
    begin_s = time.perf_counter()
    with _running(command, _vllm_environment(thread_count)):
        _wait_until_healthy(f"http://127.0.0.1:{port}", begin_s, "vLLM")
        yield f"127.0.0.1:{port}"


def _vllm_environment(thread_count: int) -> dict[str, str]:
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{thread_count - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    return environment


def free_port() -> int:
    """Find a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tempfile.gettempdir(),  # outside the repository, whose packages shadow others
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.wait()


def _wait_until_healthy(url: str, begin_s: float, what: str) -> None:
    while time.perf_counter() - begin_s < START_TIMEOUT_S:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{what} did not become healthy")


def _drive_vllm(work: dict[str, Any]) -> None:
    """Run vLLM's offline engine on the workload, with vLLM's interpreter."""
    begin_s = time.perf_counter()
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    engine = LLM(
        work["checkpoint"],
        dtype=work["precision"],
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=True,
        seed=0,
    )

    def ask_all(prompts: list[list[int]], count: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=True)
        sent_s = time.perf_counter()
        answers = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        if any(len(answer.outputs[0].token_ids) != count for answer in answers):
            raise RuntimeError("vLLM generated another number of tokens")
        return time.perf_counter() - sent_s

    ask_all([work["first"]], 1)
    measured = {"first_token_s": time.perf_counter() - begin_s}
    measured |= _alone(lambda prompt, count: ask_all([prompt], count), work)
    total_s = ask_all(work["workload"], work["output_tokens"])
    measured["output_tokens_per_s"] = len(work["workload"]) * work["output_tokens"] / total_s
    print(OUTPUT_MARK + json.dumps(measured), flush=True)


def _write_gguf(checkpoint: Path, to: Path) -> None:
    """Write the checkpoint in llama.cpp's format, using an interpreter that has `gguf`.

    Heads are not permuted, since the weights are random.
    """
    import gguf  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    raw = (checkpoint / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    writer = gguf.GGUFWriter(str(to), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = [f"t{index}".encode() for index in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    above = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        stem = name.removesuffix(".weight")
        if stem in above:
            target = above[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{parts[part]}"
        if entry["dtype"] == "F32":
            writer.add_tensor(
                f"{target}.weight",
                np.frombuffer(raw[start:end], np.float32).reshape(entry["shape"]),
            )
        elif len(entry["shape"]) == 1:  # llama.cpp requires norms in fp32
            bits = np.frombuffer(raw[start:end], np.uint16).astype(np.uint32) << 16
            writer.add_tensor(f"{target}.weight", bits.view(np.float32))
        else:
            values = np.frombuffer(raw[start:end], np.uint8).reshape(entry["shape"][0], -1)
            writer.add_tensor(f"{target}.weight", values, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if sys.argv[1] == "--gguf":
        _write_gguf(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        _drive_vllm(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
