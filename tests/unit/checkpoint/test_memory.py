"""Peak memory of reading and writing does not grow with the checkpoint."""

import subprocess
import sys
from pathlib import Path

COPY = """
import re, sys
from pathlib import Path
import torch
from moesaic.checkpoint.writer import OutputTensor, plan_files
from moesaic.checkpoint.output import output_folder
from moesaic.checkpoint.reader import read_tensor
from moesaic.checkpoint.streaming import scan
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.writer import CheckpointWriter

def peak(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

root = Path(sys.argv[1])
EMBEDDING = OutputTensor(name="embedding", dtype="BF16", shape=(65536, 1024))
tensors = [EMBEDDING, *(OutputTensor(name=f"t{i}", dtype="BF16", shape=(2048, 2048)) for i in range(58))]
layout = plan_files(tensors)
with output_folder(root / "source") as folder, CheckpointWriter(folder, layout) as writer:
    (folder / "config.json").write_text("{}")
    row = torch.arange(1024, dtype=torch.bfloat16)
    for tensor in tensors:
        block = row.repeat(2048)
        for start in range(0, tensor.nbytes // 2, block.numel()):
            writer.write(tensor.name, block, start)
    written = writer.finish()
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = peak("VmRSS")
source = open_checkpoint(root / "source")
assert sum(info.nbytes for info in source.tensors.values()) > 600e6
hashes = scan(source.tensors.values(), workers=2)
with output_folder(root / "copy") as folder, CheckpointWriter(folder, layout) as writer:
    for info in source.tensors.values():
        rows = 4096
        for row in range(0, info.shape[0], rows):
            part = read_tensor(info, row, min(row + rows, info.shape[0]))
            writer.write(info.name, part, row * info.shape[1])
    copied = writer.finish()
assert copied.tensor_hashes == written.tensor_hashes == hashes
print(peak("VmHWM") - before)
"""


def test_peak_memory_of_a_copy(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", COPY, str(tmp_path)], capture_output=True, text=True, check=True)
    growth = int(run.stdout)
    assert 0 < growth < 64e6
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
