"""Options that several commands have, written once."""

from __future__ import annotations

from typing import Annotated

import typer

RUN = "Running the model"
SAMPLE = "Choosing tokens"
ROUND = "Rounding"
LEARN = "Calibration"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, a .gguf or .safetensors file, a Hugging Face id, or smollm2 (the packaged model).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.", rich_help_panel=RUN)]
Dtype = Annotated[str, typer.Option(help="Of activations: auto, bfloat16, float16 or float32.", rich_help_panel=RUN)]
Backend = Annotated[
    str,
    typer.Option(help="The kernel for quantized weights: auto, or a name that lowbit env lists.", rich_help_panel=RUN),
]
Cache = Annotated[
    str,
    typer.Option(
        help="How keys and values are kept: auto (as --dtype), contiguous, int8, int4, fp8, ..., or two as int8/int4.",
        rich_help_panel=RUN,
    ),
]
Tokens = Annotated[
    list[int] | None,
    typer.Option("--m", help="Tokens at a time; may be given again. [default: 1 2 4 8 16 32 64 128 256]", min=1),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Round every linear to this format, such as int4_g64 or nvfp4.",
        rich_help_panel=ROUND,
        show_default=False,
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="A preset (int8 int6 int5 int4 int3 int2 ternary fp8 nf4 mxfp4 nvfp4) or a YAML or JSON file with rules.",
        rich_help_panel=ROUND,
        show_default=False,
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits",
        help="Choose the formats that lose least at so many bits per weight of the whole model; with --calibrate.",
        min=1.0,
        max=16.0,
        rich_help_panel=ROUND,
        show_default=False,
    ),
]
Tables = Annotated[
    str | None,
    typer.Option(
        "--embedding",
        help="Format of the embedding and the output head with --format, or keep. [default: int8 for narrow formats]",
        rich_help_panel=ROUND,
        show_default=False,
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        help="A regular expression; matching modules stay as they are (with --format; may be given again).",
        rich_help_panel=ROUND,
        show_default=False,
    ),
]
Search = Annotated[
    str,
    typer.Option(
        help="mse: look for the scale of least squared error; none: cover each group; auto: mse up to 6 bits.",
        rich_help_panel=ROUND,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="rtn, awq or gptq. [default: gptq with --calibrate, rtn without]",
        rich_help_panel=LEARN,
        show_default=False,
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="A UTF-8 text file, or wikipedia.", rich_help_panel=LEARN, show_default=False),
]
Samples = Annotated[int, typer.Option(help="Windows of the text to calibrate on.", min=1, rich_help_panel=LEARN)]
Length = Annotated[int, typer.Option(help="Tokens per window.", min=2, rich_help_panel=LEARN)]
Order = Annotated[
    str, typer.Option(help="gptq: groups, columns or none, see docs/quantizing.md.", rich_help_panel=LEARN)
]
Damping = Annotated[
    float, typer.Option(help="gptq: share of the mean added to the Hessian's diagonal.", rich_help_panel=LEARN)
]
HeldOut = Annotated[
    int,
    typer.Option(
        "--held-out",
        help="Windows at the text's end that the result is compared with the original on; 0: no comparison.",
        min=0,
        rich_help_panel=LEARN,
    ),
]
MaxTokens = Annotated[int, typer.Option(help="New tokens at most.", rich_help_panel=SAMPLE)]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 draws.", rich_help_panel=SAMPLE)]
TopK = Annotated[int, typer.Option(help="Draw among this many tokens; 0: all.", rich_help_panel=SAMPLE)]
TopP = Annotated[
    float, typer.Option(help="Draw among the likeliest tokens of this share; 1: all.", rich_help_panel=SAMPLE)
]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this times the likeliest; 0: none.", rich_help_panel=SAMPLE)
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.", rich_help_panel=SAMPLE)]
