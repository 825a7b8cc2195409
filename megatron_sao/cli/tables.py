"""How the commands print text and tables of figures: 120 columns wide where the output is no terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

FILE_COLUMNS = 120

GIB, MIB = 2**30, 2**20


class Report:
    """Prints lines and tables."""

    def __init__(self) -> None:
        console = Console()
        self.console = console if console.is_terminal else Console(width=FILE_COLUMNS)

    def say(self, text: str) -> None:
        """One paragraph as it stands, folded by nobody."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column to the left, figures to the right."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def gib(num_bytes: float) -> str:
    """ "1,234.50" """
    return f"{num_bytes / GIB:,.2f}"
