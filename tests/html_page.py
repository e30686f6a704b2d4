"""What a page of HTML is made of, and what it would load."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what a browser would load from elsewhere, and the tags that are open."""

    def __init__(self, text):
        super().__init__()
        self.references = []
        self.open_tags = []
        self.num_svg = 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.num_svg += tag == "svg"
        if tag not in ("meta", "link", "br", "img"):
            self.open_tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action") or "url(" in (value or ""):
                self.references.append(value)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag
