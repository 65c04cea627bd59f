"""Compare a running `lorakit serve` with the tests of other servers, a fuzzer and an evaluation program."""
