"""Held-out documents and their domains."""

import json

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.evaluation.perplexity import held_out_files, read_documents


def test_no_domain_takes_the_name_of_the_total(tmp_path):
    (tmp_path / "texts.valid.jsonl").write_text(json.dumps({"text": "a", "domain": "all"}) + "\n")
    with pytest.raises(MoesaicError, match=r"texts\.valid\.jsonl:1: the domain is called 'all'"):
        read_documents(held_out_files(tmp_path), domain_field="domain")
