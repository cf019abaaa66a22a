"""The records of evaluation runs: `caddie_sdk.records`, under the name by which evals know them."""

from caddie_sdk.records import RecordError, RecordFile, keep_records, read_records

__all__ = ["RecordError", "RecordFile", "keep_records", "read_records"]
