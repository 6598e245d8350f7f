"""The dashboard at `/ui`: pages for people, each also as JSON and CSV. It changes nothing but what its reader deletes.

    routes      the paths; start here
    access      who reads: sign-in, the session cookie, the CSRF token; errors as pages; security headers
    render      a page as HTML, JSON or CSV; the files beside the pages
    text        numbers, times, hostile texts, differences
    sessions    the list of sessions, two sessions compared
    session     one session: what was said beside what was sent
    overview    what was paid, what would have been paid, and where the difference is from
    cache       why the provider's cache missed; tools declared and tools called
    policies    the configuration, and the lab

What takes long is a pure function of what was read: `… -> Page`. A page's data is what `.json` answers, and what the
template shows.
"""

from __future__ import annotations

from proxy.dashboard.routes import router
