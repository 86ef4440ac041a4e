"""Files of drafts: what they hold, by whichever layout and format, and the draft that comes out of them."""
