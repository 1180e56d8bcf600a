"""What the site has beside the Markdown files: the notebooks of examples/, MathJax, and links to papers."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from jinja2 import DictLoader
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(
    r"(?:<code>)?docs/(?P<page>[\w/]+)\.md(?:</code>)?|(?P<kept><(?P<tag>a|code|pre)\b.*?</(?P=tag)>)"
    r"|arXiv:(?P<number>\d{4}\.\d{4,5})",
    re.DOTALL,
)
SCRIPT = re.compile(r"^\[examples/(?P<name>\w+\.py)\]\(\.\./examples/(?P=name)\)$", re.MULTILINE)
CELLS = """
{% extends "markdown/index.md.j2" %}
{% block input %}
{% if "plt.show()" in cell.source and cell.source.count("\n") >= 8 %}
<details markdown>
<summary>Code of the picture</summary>

{{ super() }}

</details>
{% else %}
{{ super() }}
{% endif %}
{% endblock %}
{% block stream %}
```text
{{ output.text | strip_ansi | trim }}
```
{% endblock %}
{% block data_png %}
![]({{ output.metadata.filenames["image/png"] }})
{% endblock %}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    mathjax = resources.files("mathjax") / "static/mathjax/es5/tex-svg.js"
    files.append(File.generated(config, "assets/mathjax.js", content=mathjax.read_bytes()))
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        page, pictures = converted(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def converted(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as it was stored: Markdown, and its pictures by file name, NOTEBOOK/1.png and so on."""
    exporter = MarkdownExporter(extra_loaders=[DictLoader({"cells.md.j2": CELLS})], template_file="cells.md.j2")
    page, found = exporter.from_filename(str(path), resources={"output_files_dir": path.stem})
    page = re.sub(r"\]\(#(.+?)\)", lambda link: f"](#{slugify(link[1], '-')})", page)  # Jupyter's names of sections
    page = page.replace("](../docs/", "](../")
    pictures = {}
    for number, (name, content) in enumerate(found["outputs"].items(), 1):
        pictures[new := f"{path.stem}/{number}.png"] = content
        page = page.replace(f"]({name})", f"]({new})")
    return described(page), pictures


def described(page: str) -> str:
    """Every picture gets the heading above it as its text."""
    heading, is_code, lines = "", False, []
    for line in page.splitlines():
        is_code ^= line.startswith("```")
        heading = line.lstrip("# ") if re.match(r"##? ", line) and not is_code else heading
        lines.append(line.replace("![](", f"![{heading}](", 1) if line.startswith("![](") else line)
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to notebooks of examples/ go to their pages; a script that a line links to is shown there, folded."""

    def folded(link: re.Match[str]) -> str:
        code = (ROOT / "examples" / link["name"]).read_text("utf-8")
        summary = f"<summary>examples/{link['name']}</summary>"
        return f"<details markdown>\n{summary}\n\n````python\n{code}````\n\n</details>"

    markdown = SCRIPT.sub(folded, markdown)
    to_notebooks = "../" * page.file.src_uri.count("/") + "notebooks/"
    return re.sub(r"\]\((?:\.\./)+examples/(\w+)\.ipynb\)", rf"]({to_notebooks}\1.md)", markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Papers and pages that docstrings name become links."""
    to_top = "../" * page.url.count("/")

    def link(found: re.Match[str]) -> str:
        if found["kept"]:
            return found["kept"]
        if found["page"]:
            return f'<a href="{to_top}{found["page"]}.html">{found["page"].split("/")[-1].replace("_", " ")}</a>'
        return f'<a href="https://arxiv.org/abs/{found["number"]}">arXiv:{found["number"]}</a>'

    return NAMED.sub(link, html)
