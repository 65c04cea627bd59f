"""Count and time requests for Prometheus, per adapter.

Invariant: a label is the base's name, the name of a loaded adapter, or empty. The registry is the server's own.
"""

import math
import time
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, filterfalse
from operator import add
from statistics import mean
from typing import Final, final

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.answer import TOKEN_SECONDS
from lorakit.serving.request_log import RequestRecord

LONG_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
VLLM_NAMES: Final = {
    "lorakit_prompt_tokens": "vllm:prompt_tokens",
    "lorakit_cached_prompt_tokens": "vllm:prompt_tokens_cached",
    "lorakit_generation_tokens": "vllm:generation_tokens",
    "lorakit_answers": "vllm:request_success",
    "lorakit_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "lorakit_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "lorakit_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "lorakit_request_seconds": "vllm:e2e_request_latency_seconds",
}
"""metric -> vLLM's name of its sum over all adapters, which dashboards and gateways read"""


@final
class RequestMetrics(Collector):
    """The metrics of one server. engine_counts, log_lines_lost: called for the numbers of now. totals: the engine's."""

    def __init__(
        self,
        base_name: str,
        pool: AdapterPool,
        engine_counts: Callable[[], Mapping[str, int]],
        totals: Mapping[str, int],
        log_lines_lost: Callable[[], int] = int,
    ) -> None:
        self._totals = totals
        self._log_lines_lost = log_lines_lost
        self._base_name = base_name
        self._pool = pool
        self._engine_counts = engine_counts
        self.under_way: set[RequestRecord] = set()
        self._last_seconds = deque([0.0], maxlen=32)  # of the last answers
        self.num_requests: Tally[str] = Tally()  # by adapter
        ended = "Counts the requests for completions and embeddings that have ended, by HTTP status, 499 for a client"
        self._requests = Counter("lorakit_requests", f"{ended} that left.", ["adapter", "status"], registry=None)
        text = "Counts the choices that ended by themselves, by reason."
        self._answers = Counter("lorakit_answers", text, ["adapter", "finished_reason"], registry=None)
        self._prompt_tokens = _tokens("prompt_tokens", "Counts the tokens of prompts and of inputs to embed.")
        self._cached_tokens = _tokens("cached_prompt_tokens", "Counts the tokens of prompts read from the cache.")
        self._tokens = _tokens("generation_tokens", "Counts the tokens that were generated.")
        self._first = _seconds("time_to_first_token", "Measures from a request to its first token.", LONG_SECONDS)
        self._seconds = _seconds("request", "Measures from a request to the end of its answer.", LONG_SECONDS)
        self._between: dict[str, list[float]] = {}  # adapter -> times between two tokens by bound, and their sum
        self._per_token = _seconds("time_per_output_token", "Measures the mean of each choice.", TOKEN_SECONDS)
        self._metrics = [value for value in vars(self).values() if isinstance(value, Counter | Histogram)]

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended, if its route is counted."""
        self.under_way.discard(record)
        if not record.is_counted:
            return
        adapter = record.served if record.served == self._base_name or record.served in self._pool else ""
        if adapter not in self.num_requests:  # a new label
            self._remove_unloaded()
        self.num_requests[adapter] += 1
        self._requests.labels(adapter, str(record.status)).inc()
        if record.num_prompt_tokens:
            self._prompt_tokens.labels(adapter).inc(record.num_prompt_tokens)
            self._cached_tokens.labels(adapter).inc(record.num_cached_tokens)
            self._last_seconds.append(record.seconds)
        if not record.choices:
            return
        self._tokens.labels(adapter).inc(record.num_tokens)
        self._seconds.labels(adapter).observe(record.seconds)
        if record.first_token_seconds is not None:
            self._first.labels(adapter).observe(record.first_token_seconds)
        for choice in record.choices:
            if choice.reason is not None:
                self._answers.labels(adapter, choice.reason).inc()
            if number := sum(choice.num_between):
                seconds = choice.token_times[-1] - choice.token_times[0]
                own = [*choice.num_between, seconds]  # counted as they came, because an answer has thousands
                self._between[adapter] = list(map(add, own, self._between.get(adapter, [0.0] * len(own))))
                self._per_token.labels(adapter).observe(seconds / number)

    def retry_seconds(self) -> int:
        """Return the seconds to the next answer: of the last ones on average, over the requests under way; 1 to 60."""
        return math.ceil(min(60.0, max(1.0, mean(self._last_seconds) / max(1, len(self.under_way)))))

    def collect(self) -> Iterator[Metric]:
        self._remove_unloaded()
        for family in [self._inter_token(), *chain.from_iterable(metric.collect() for metric in self._metrics)]:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if family.name in VLLM_NAMES:
                yield self._summed(family, VLLM_NAMES[family.name])
        counts = self._engine_counts()
        for name, value in counts.items():
            what = f"{name.replace('_', ' ')} of the engine" if "bytes" in name else f"choices or inputs {name}"
            yield _gauge(f"lorakit_engine_{name}", f"Shows the {what} now.", {}, value)
        for name, value in self._totals.items():
            text = f"Counts the {name.replace('_', ' ')} of the engine."
            yield CounterMetricFamily(f"lorakit_engine_{name}", text, value)
        names = self._pool.names
        yield _gauge("lorakit_adapters", "Shows the adapters that requests may name now.", {}, len(names))
        in_memory = sum(map(self._pool.model.is_loaded, names))
        yield _gauge("lorakit_adapters_in_memory", "Shows the adapters that are in memory now.", {}, in_memory)
        label = {"model_name": self._base_name}
        running = counts["decoding"] + counts["prefilling"]
        yield _gauge("vllm:num_requests_running", "Shows the choices that are computed now.", label, running)
        yield _gauge("vllm:num_requests_waiting", "Shows the choices that wait now.", label, counts["waiting"])
        yield self._adapters_under_way()
        text = "Counts the lines of the log that could not be written."
        yield CounterMetricFamily("lorakit_log_lines_lost", text, self._log_lines_lost())

    def _inter_token(self) -> Metric:
        name = "lorakit_inter_token_seconds"
        family = HistogramMetricFamily(name, "Measures from each token to the next.", labels=["adapter"])
        for adapter, (*numbers, seconds) in list(self._between.items()):  # to which the event loop adds
            buckets = zip([*map(str, TOKEN_SECONDS), "+Inf"], accumulate(numbers), strict=True)
            family.add_metric([adapter], list(buckets), seconds)
        return family

    def _adapters_under_way(self) -> Metric:
        """Return the gauge that gateways choose a server by: the adapters of the requests under way."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for record in list(self.under_way):
            if record.num_prompt_tokens and record.served not in ("", self._base_name):
                names[record.first_token_seconds is not None].add(record.served)
        labels = {
            "max_lora": str(len(self._pool.names)), "running_lora_adapters": ",".join(sorted(names[True])),
            "waiting_lora_adapters": ",".join(sorted(names[False])),
        }  # fmt: skip
        return _gauge("vllm:lora_requests_info", "Names the adapters of the requests under way.", labels, time.time())

    def _summed(self, family: Metric, name: str) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "adapter"}
            sums[sample.name.removeprefix(family.name), tuple(labels.items())] += sample.value
        summed = Metric(name, family.documentation, family.type)
        for (suffix, others), value in sums.items():
            summed.add_sample(name + suffix, {"model_name": self._base_name, **dict(others)}, value)
        return summed

    def _remove_unloaded(self) -> None:
        """Remove the labels of adapters that are loaded no more, so that loading many in turn needs no more memory."""
        for adapter in filterfalse(self._pool.__contains__, set(self.num_requests) - {"", self._base_name}):
            del self.num_requests[adapter]
            self._between.pop(adapter, None)
            for metric in self._metrics:
                metric.remove_by_labels({"adapter": adapter})


def _tokens(name: str, text: str) -> Counter:
    return Counter(f"lorakit_{name}", text, ["adapter"], registry=None)


def _seconds(name: str, text: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(f"lorakit_{name}_seconds", text, ["adapter"], buckets=buckets, registry=None)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    metric = Metric(name, text, "gauge")
    metric.add_sample(name, dict(labels), value)
    return metric
