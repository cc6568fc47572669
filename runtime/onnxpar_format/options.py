"""The options of the commands that run programs.

Each option is declared once: the command line has an option for each field (`Option` describes it),
and the runtime takes the objects. A field's help says what it means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from onnxpar_format.option import Option, parse_betas, parse_bytes

Ort = Annotated[Sequence[str], Option("An option of onnxruntime; may be repeated.", "KEY=VALUE")]
CustomOps = Annotated[
    Sequence[str | Path], Option("A custom-op library of the model; may be repeated.", "FILE")
]
StartTokens = Annotated[
    Sequence[int],
    Option(
        "A token with which the decoder of an encoder-decoder begins; may be repeated. "
        "Default: decoder_start_token_id of the configuration in the folder --tokenizer.",
        "TOKEN",
        minimum=0,
    ),
]


DebugNan = Annotated[
    bool,
    Option(
        "End at the first NaN or infinite result, and name the node where it begins. Needs much "
        "memory and time.",
        flags=("--debug-nan",),
    ),
]


Metric = Annotated[
    Sequence[str],
    Option(
        "Also report at each evaluation: perplexity, f1, topK (such as top5), or module:function, "
        "which returns an object with the methods update and compute; may be repeated. Accuracy "
        "is reported in any case if the loss has classes.",
        "NAME",
        values=("perplexity", "f1", "top5"),
    ),
]


_SOURCES = ("digits", "npz:", "parquet:", "tokens:", "idx:")


@dataclass(frozen=True)
class Execution:
    """How a rank's program runs."""

    device: Annotated[
        str,
        Option(
            "auto, cpu, cuda, or cuda:NUMBER for one GPU.",
            "DEVICE",
            values=("auto", "cpu", "cuda", "cuda:"),
        ),
    ] = "auto"
    transport: Annotated[
        str,
        Option(
            "auto, mpi, nccl or threads.",
            "TRANSPORT",
            values=("auto", "mpi", "nccl", "threads"),
        ),
    ] = "auto"
    log_dir: Annotated[
        Path | None, Option("Write rank0000.log, rank0001.log, … to this folder.", "FOLDER")
    ] = None
    trace: Annotated[
        Path | None,
        Option(
            "Write when each rank did what, for Perfetto, chrome://tracing and `onnxpar trace`.",
            "FILE.json",
        ),
    ] = None
    trace_operators: Annotated[
        bool, Option("With --trace: also the times of operators.", flags=("--trace-operators",))
    ] = False
    ort: Ort = ()
    custom_ops: CustomOps = ()


@dataclass(frozen=True)
class Settings:
    """The settings of an optimizer; None takes the default of its kind."""

    momentum: Annotated[
        float | None, Option("Momentum, for the optimizer momentum. Default: 0.9.", "M")
    ] = None
    dampening: Annotated[
        float | None, Option("Dampening, for the optimizer momentum. Default: 0.", "D")
    ] = None
    betas: Annotated[
        tuple[float, float] | None,
        Option(
            "Decay rates of the moments, for adam, adamw and lamb. Default: 0.9,0.999.",
            "A,B",
            parse=parse_betas,
        ),
    ] = None
    eps: Annotated[
        float | None,
        Option("Epsilon, for adam and adamw (default 1e-8) and lamb (default 1e-6).", "E"),
    ] = None
    weight_decay: Annotated[
        float | None, Option("Weight decay. Default: 0.01 for adamw and lamb, otherwise 0.", "W")
    ] = None
    clip_norm: Annotated[
        float | None, Option("Clip gradients to this global 2-norm. Default: no clipping.", "C")
    ] = None


@dataclass(frozen=True)
class Saving:
    """When checkpoints are written, and where."""

    checkpoint: Annotated[Path | None, Option("Write checkpoints to this folder.", "FOLDER")] = None
    every: Annotated[
        int | None,
        Option("Write a checkpoint every K steps (default 100) and after the last step.", "K"),
    ] = None
    keep: Annotated[int | None, Option("Keep the last N checkpoints. Default: 2.", "N")] = None
    keep_best: Annotated[
        bool,
        Option(
            "Write and keep also the checkpoint after which an evaluation had the smallest loss.",
            flags=("--keep-best",),
        ),
    ] = False
    grace: Annotated[
        float | None,
        Option(
            "At Ctrl-C and SIGTERM (under plain mpirun: SIGUSR2), end after the current step with "
            "a last checkpoint, within S seconds. Default: end at once, without a checkpoint.",
            "S",
        ),
    ] = None


@dataclass(frozen=True)
class TrainingRun:
    """The options of `train`."""

    data: Annotated[
        str,
        Option(
            "digits (scikit-learn's handwritten digits), npz:FILE or parquet:FILE (arrays with the "
            "names of the inputs), tokens:FILE,seq=N (a file of tokens), idx:DIR (MNIST's files) "
            "or module:function (it returns an iterable of dicts).",
            "SOURCE",
            values=_SOURCES,
        ),
    ]
    lr: Annotated[float, Option("Learning rate.", "X")]
    batch_size: Annotated[int | None, Option("Samples in a step, over all ranks.", "B")] = None
    epochs: Annotated[
        int | None, Option("Epochs. Default: 1, or as many as --steps needs.", "E")
    ] = None
    steps: Annotated[
        int | None, Option("Stop after this number of steps, over all epochs.", "K")
    ] = None
    seed: Annotated[
        int, Option("Seed for the order of samples and for dropout.", "S", minimum=0)
    ] = 0
    settings: Settings = Settings()
    loss_scale: Annotated[
        str | None,
        Option(
            "Loss scale for 16-bit computation. Default: dynamic for float16, 1 for bfloat16.",
            "dynamic|N",
            values=("dynamic",),
        ),
    ] = None
    accumulate: Annotated[
        int | None,
        Option(
            "Micro-batches in a step. Default: the strategy's number; without one, that of the "
            "stages, 2 if micro-batches take turns (pair_micro_batches), or else 1.",
            "K",
        ),
    ] = None
    schedule: Annotated[
        str,
        Option("constant, linear or cosine.", "KIND", values=("constant", "linear", "cosine")),
    ] = "constant"
    warmup: Annotated[
        int, Option("Number of steps in which the learning rate rises from 0.", "K")
    ] = 0
    evaluate: Annotated[
        bool,
        Option(
            "Evaluate after each epoch, on the test split of SOURCE if it has one.",
            flags=("--eval",),
        ),
    ] = False
    eval_data: Annotated[
        str | None,
        Option("Evaluate after each epoch on this source, of any kind.", "SOURCE", values=_SOURCES),
    ] = None
    validation: Annotated[
        float | None,
        Option(
            "Hold out this part of the samples of SOURCE, chosen by the seed, and evaluate on them "
            "after each epoch.",
            "FRACTION",
        ),
    ] = None
    eval_batch_size: Annotated[
        int | None,
        Option(
            "Samples in a batch of an evaluation. Default: up to 256, if the symbols allow it.",
            "B",
            minimum=1,
        ),
    ] = None
    eval_every: Annotated[
        int | None, Option("Evaluate after every K-th step, not after each epoch.", "K", minimum=1)
    ] = None
    eval_steps: Annotated[
        int | None, Option("Evaluate on the first K batches only.", "K", minimum=1)
    ] = None
    patience: Annotated[
        int | None,
        Option(
            "Stop when N evaluations, one after another, have no smaller loss than the best.",
            "N",
            minimum=1,
        ),
    ] = None
    metric: Metric = ()
    parameters: Annotated[Path | None, Option("Initial parameters, written by --save.", "FILE")] = (
        None
    )
    save: Annotated[
        Path | None, Option("Write the trained parameters, complete, as safetensors.", "FILE")
    ] = None
    checkpoints: Saving = Saving()
    resume: Annotated[
        Path | None, Option("Continue from a checkpoint, or from the last one in a folder.", "PATH")
    ] = None
    log: Annotated[Path | None, Option("Write a JSON line for each step.", "FILE")] = None
    peak_flops: Annotated[
        float | None,
        Option(
            "The most operations per second of a device, to log the utilisation (mfu).",
            "X",
        ),
    ] = None
    tensorboard: Annotated[
        Path | None, Option("Write event files for TensorBoard to this folder.", "DIR")
    ] = None
    debug_nan: DebugNan = False
    print_every: Annotated[
        int, Option("Print every K-th step of an epoch; 0 prints none.", "K", minimum=0)
    ] = 1
    log_every: Annotated[
        int,
        Option(
            "Read, check, print and log only the losses of every K-th step and of the last one, "
            "without waiting for a GPU in between.",
            "K",
            minimum=1,
        ),
    ] = 1
    grad_norm: Annotated[
        Sequence[str],
        Option(
            "Also log the norm of the gradients of the parameters that match NAME, a name or a "
            "pattern such as *.attention.*; may be repeated. Adds these gradients up once more.",
            "NAME",
        ),
    ] = ()
    no_overlap: Annotated[
        bool,
        Option(
            "For debugging: run no collective in the background.",
            flags=("--no-overlap",),
        ),
    ] = False
    check_replicas: Annotated[
        int | None,
        Option(
            "Compare replicas of some parameters and moments bit for bit after every K-th step, "
            "for debugging.",
            "K",
            minimum=1,
        ),
    ] = None


@dataclass(frozen=True)
class EvaluationRun:
    """The options of `eval`."""

    data: Annotated[
        str,
        Option(
            "As for `onnxpar train`; digits and idx:DIR use their test split.",
            "SOURCE",
            values=_SOURCES,
        ),
    ]
    parameters: Annotated[
        Path | None, Option("Trained parameters from `onnxpar train --save`.", "FILE")
    ] = None
    batch_size: Annotated[
        int | None, Option("Samples in a batch. Default: up to 256, if the symbols allow it.", "B")
    ] = None
    metric: Metric = ()
    debug_nan: DebugNan = False
    as_json: Annotated[bool, Option("Print JSON.", flags=("--json",))] = False


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits."""

    temperature: Annotated[
        float,
        Option(
            "Divide logits by this, from 0.0001 to 10000; 0 takes the best token.", "T", minimum=0
        ),
    ] = 0.0
    top_k: Annotated[
        int | None, Option("Draw among the K best tokens. Default: all.", "K", minimum=1)
    ] = None
    top_p: Annotated[
        float,
        Option("Draw among the likeliest tokens, whose probabilities add up to P.", "P"),
    ] = 1.0
    repetition_penalty: Annotated[
        float,
        Option(
            "For tokens that have occurred: divide positive logits by R, and multiply negative "
            "ones by R, from 0.01 to 100.",
            "R",
        ),
    ] = 1.0
    seed: Annotated[int, Option("Seed of the draws.", "S", minimum=0)] = 0


@dataclass(frozen=True)
class BeamSearch:
    """How beam search finds the likeliest sequences."""

    beams: Annotated[
        int,
        Option(
            "Search with N beams for each prompt; 1 chooses token by token.",
            "N",
            minimum=1,
            maximum=1024,
        ),
    ] = 1
    length_penalty: Annotated[
        float,
        Option(
            "With --beams: divide the score of a sequence by its number of new tokens to the power "
            "of P, from -10 to 10. Large values favour long sequences.",
            "P",
        ),
    ] = 1.0
    early_stopping: Annotated[
        str,
        Option(
            "With --beams: when the search for a prompt ends, as in transformers. true: as soon as "
            "there are N complete sequences. false: when there are N, and no beam, at its present "
            "length, scores better than the worst of them. never: when there are N, and no beam "
            "can ever score better than the worst of them.",
            "WHEN",
            values=("true", "false", "never"),
        ),
    ] = "false"


@dataclass(frozen=True)
class GenerationRun:
    """The options of `generate`."""

    tokens: Annotated[
        Path | None, Option("JSON file with a list of prompts, each a list of tokens.", "FILE.json")
    ] = None
    prompt: Annotated[
        Sequence[str], Option("A prompt as text, with --tokenizer; may be repeated.", "TEXT")
    ] = ()
    inputs: Annotated[
        Path | None,
        Option(
            ".npz file with the inputs of an encoder, a row for each sequence. Without it, an "
            "encoder of tokens reads the prompts.",
            "FILE.npz",
        ),
    ] = None
    start: StartTokens = ()
    chat: Annotated[
        bool,
        Option(
            "Each --prompt is a message from a user. The chat template in the folder --tokenizer "
            "turns it into a prompt.",
            flags=("--chat",),
        ),
    ] = False
    system: Annotated[
        str | None, Option("With --chat, the system message before the user's.", "TEXT")
    ] = None
    tokenizer: Annotated[
        Path | None,
        Option(
            "Folder with tokenizer.json, to read prompts and print text; needs the package "
            "tokenizers.",
            "FOLDER",
        ),
    ] = None
    max_new_tokens: Annotated[
        int,
        Option("Largest number of new tokens for each prompt.", "K", minimum=1, maximum=1 << 20),
    ] = 128
    chunk: Annotated[
        int,
        Option(
            "Largest number of tokens of each prompt in a run; longer prompts take several runs.",
            "C",
            minimum=1,
        ),
    ] = 512
    eos: Annotated[
        Sequence[int],
        Option("A token that completes a sequence; may be repeated.", "TOKEN", minimum=0),
    ] = ()
    stop: Annotated[
        Sequence[str],
        Option("Text that completes a sequence, with --tokenizer; may be repeated.", "TEXT"),
    ] = ()
    sampling: Sampling = Sampling()
    search: BeamSearch = BeamSearch()
    logprobs: Annotated[
        int | None,
        Option(
            "With --json: print the log-probability of each new token, and the K likeliest tokens "
            "with theirs.",
            "K",
            minimum=0,
        ),
    ] = None
    as_json: Annotated[
        bool, Option("Print JSON when all sequences are complete.", flags=("--json",))
    ] = False


@dataclass(frozen=True)
class ServingRun:
    """The options of `serve`."""

    tokenizer: Annotated[
        Path | None,
        Option(
            "Folder with tokenizer.json and, for chats, a template; without it, clients send and "
            "get tokens.",
            "FOLDER",
        ),
    ] = None
    host: Annotated[str, Option("Address on which to listen.", "HOST")] = "127.0.0.1"
    port: Annotated[int, Option("Port; 0 takes a free one.", "PORT", minimum=0, maximum=65535)] = (
        8000
    )
    name: Annotated[
        str | None, Option("Name of the model for clients. Default: the name of DIR.", "NAME")
    ] = None
    slots: Annotated[
        int | None,
        Option(
            "Largest number of requests that run at the same time. Default: 8; with "
            "--cache-memory as many as fit, at most 64.",
            "N",
            minimum=1,
        ),
    ] = None
    prefixes: Annotated[
        int | None,
        Option(
            "Largest number of prompt tokens whose caches are kept for prompts that begin alike. "
            "Default: as many as a request may have; none with --cache-memory.",
            "TOKENS",
            minimum=0,
        ),
    ] = None
    cache_memory: Annotated[
        int | None,
        Option(
            "Memory for caches on each device, such as 8GiB. A request waits until its complete "
            "cache fits beside those of the others.",
            "SIZE",
            parse=parse_bytes,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        Option(
            "Largest number of tokens of a request, prompt and answer. Default: as many as the "
            "model admits, at most 2048.",
            "L",
            minimum=2,
        ),
    ] = None
    start: StartTokens = ()
    chunk: Annotated[
        int, Option("Largest number of prompt tokens in one step.", "C", minimum=1)
    ] = 256
    queue: Annotated[
        int,
        Option("Largest number of waiting requests; further ones are refused.", "N", minimum=0),
    ] = 64
    eos: Annotated[
        Sequence[int],
        Option("A token that completes an answer; may be repeated.", "TOKEN", minimum=0),
    ] = ()


@dataclass(frozen=True)
class VerifyOptions:
    """What `verify` compares and how strictly."""

    seed: Annotated[int, Option("Seed of the random inputs.", "S", minimum=0)] = 0
    rtol: Annotated[
        float | None,
        Option(
            "Tolerance relative to the largest magnitude of an output. Default by dtype: "
            "float64 1e-12, float32 1e-5, float16 1e-2, bfloat16 5e-2, integers exact.",
            "R",
            minimum=0,
        ),
    ] = None
    atol: Annotated[
        float, Option("Absolute tolerance, added to the relative one.", "A", minimum=0)
    ] = 0.0
    steps: Annotated[
        int | None,
        Option("For a training directory: steps in each case. Default: 1.", "K", minimum=1),
    ] = None
    lr: Annotated[
        float | None,
        Option(
            "For a training directory: learning rate. Default: depends on the optimizer.",
            "X",
            minimum=0,
        ),
    ] = None
    generate: Annotated[
        int | None,
        Option(
            "For a decoder with a cache: compare tokens and logits of N greedy steps.",
            "N",
            minimum=1,
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        Option("With --generate: tokens of the longest prompt. Default: 64.", "L", minimum=1),
    ] = None
    ort: Ort = ()
    custom_ops: CustomOps = ()
