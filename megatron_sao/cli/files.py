"""Names inside a run folder that more than one command knows."""

CONFIG_FILE = "config.toml"  # the resolved configuration
LOGS_FOLDER = "logs"  # one file a process
ADDRESS_FILE = "scheduler.json"  # where the scheduler listens; the trainer waits for it
LEDGER_FILE = "ledger.sqlite"  # what became of every prompt
STOP_FILE = "stop"  # whoever makes it wants the run to save and end
CHECKPOINTS_FOLDER = "checkpoints"  # step-000040/ and so on
SUMMARY_FILE = "scheduler_summary.json"  # the scheduler's counts, however the run ended
RESULT_FILE = "result.json"  # the trainer's figures, after a whole run
EXPORT_FOLDER = "export"  # the policy as a HF folder
