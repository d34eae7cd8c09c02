"""Draw federated-averaging.svg: the labels that each client holds. `python docs/gallery/draw.py` writes it."""

from pathlib import Path

from sklearn.datasets import load_digits

import unisono as un

CLIENTS, WIDTH, HEIGHT = 20, 14, 140
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#ee8866", "#44bb99", "#99ddff")


def bars(labels, partition, left):
    """Return a bar for each client, cut by how many samples of each digit it holds."""
    parts = un.data.DataPartitioner(labels, [1 / CLIENTS] * CLIENTS, 0, partition=partition)
    for client in range(CLIENTS):
        held, top = list(parts.use(client)), 30.0
        for digit, color in enumerate(COLORS):
            height = HEIGHT * held.count(digit) / len(held)
            place = f'x="{left + client * WIDTH}" y="{top:.1f}" width="{WIDTH - 2}" height="{height:.1f}"'
            if height:
                yield f'<rect {place} fill="{color}"/>'
            top += height


def picture():
    labels = load_digits().target[:1400].tolist()
    lines = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 210" role="img" '
            'aria-label="Digits that each of 20 clients holds">'
        ),
        "<title>Digits that each of 20 clients holds</title>",
        "<style>text{font:13px sans-serif;fill:#777}</style>",
        '<text x="10" y="18">same mix (stratified)</text><text x="330" y="18">Dirichlet, alpha = 0.1</text>',
        *bars(labels, un.data.stratified(labels), 10),
        *bars(labels, un.data.dirichlet(labels, alpha=0.1), 330),
    ]
    for digit, color in enumerate(COLORS):
        lines.append(f'<rect x="{10 + 40 * digit}" y="186" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{26 + 40 * digit}" y="197">{digit}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("federated-averaging.svg").write_text(picture())
