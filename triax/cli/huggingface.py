"""How does a model come in from a Hugging Face folder, and go out to one?"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from triax.units import format_bytes, format_count

huggingface_app = typer.Typer()


@huggingface_app.command("import")
def import_folder(
    hf_folder: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors files.")],
    checkpoint_folder: Annotated[Path, typer.Argument(help="The checkpoint to make; it must not exist yet.")],
) -> None:
    """Make a checkpoint of step 0 from the folder of a Hugging Face model.

    `[model] init = CHECKPOINT_FOLDER` in a run file starts from it.
    """
    from triax.checkpoint.huggingface import import_folder as make

    made = make(hf_folder, checkpoint_folder)
    print(f"{format_count(made.num_parameters)} parameters, {format_bytes(made.num_bytes)} in {made.folder}")
    if made.carried:
        print(f"carried along: {', '.join(made.carried)}")


@huggingface_app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run's folder for its newest.")],
    hf_folder: Annotated[Path, typer.Argument(help="The folder to make; it must not exist yet.")],
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Numbers to store; absent: those of the imported model, else bf16."),
    ] = None,
) -> None:
    """Make the folder of a Hugging Face model from a checkpoint, and compare the two before it is there."""
    from triax.verify.export import export_checkpoint

    made = export_checkpoint(checkpoint, hf_folder, dtype)
    written = made.written
    files = "1 file" if written.num_files == 1 else f"{written.num_files} files"
    print(
        f"{format_count(written.num_parameters)} parameters as {made.dtype}, {format_bytes(written.num_bytes)} in "
        f"{files} of {hf_folder}"
    )
    if written.carried:
        print(f"carried along: {', '.join(written.carried)}")
    print(
        f"read back and compared on {made.tokens} tokens ({made.text}): logits up to {made.largest_logit:.3g} equal "
        f"within {made.difference:.1e}; rounding to {made.dtype} changed them by at most {made.rounding:.1e}"
    )
