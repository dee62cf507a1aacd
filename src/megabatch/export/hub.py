"""A folder on the Hugging Face hub."""

from pathlib import Path

from megabatch import extras


def check_token() -> None:
    """Raises an error if nobody is logged in, before anything is written."""
    hub = extras.load("huggingface_hub", extra="huggingface", purpose="A model on the hub")
    if hub.get_token() is None:
        raise ValueError("--push must have a token of the Hugging Face hub, got none: `hf auth login` or HF_TOKEN gives one")


def push(folder: Path, name: str) -> str:
    """Uploads the folder as a model and returns its address. Creates a private model if there is none of this name.

    Args:
        folder: of an export.
        name: "USER/MODEL", or "MODEL" of the user who is logged in.
    """
    api = extras.load("huggingface_hub", extra="huggingface", purpose="A model on the hub").HfApi()
    address = api.create_repo(name, repo_type="model", private=True, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=address.repo_id, repo_type="model", commit_message="megabatch export")
    return str(address)
