// Settings > Stable Fast: the settings for experts are folded away until they are asked for.

(function() {
    let open = false;

    // those after the heading: one that is among the quick settings at the top of the page stays there
    function experts(heading) {
        // Gradio gives the heading's inner part the same id
        const all = Array.from(document.querySelectorAll('[id^="setting_sfast_"]')).filter((each) => each.id !== heading.id);
        return all.filter((each) => heading.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING);
    }

    function fold() {
        const heading = document.getElementById('setting_sfast_expert_heading');
        if (!heading) {
            return;
        }
        let button = heading.querySelector('.sfast-link');
        if (!button) {
            button = stableFast.add(heading, 'button', undefined, 'sfast-link');
            button.type = 'button';
            button.addEventListener('click', () => {
                open = !open;
                fold();
            });
        }
        const said = open ? 'Hide these settings' : 'Show these settings';
        if (button.dataset.said !== said) {
            button.dataset.said = said;
            button.textContent = said;
            button.setAttribute('aria-expanded', String(open));
        }
        experts(heading).forEach((each) => each.classList.toggle('sfast-unseen', !open));
    }

    function start() {
        fold();
        // what is searched for is shown, also if it is one of these
        const search = document.querySelector('#settings_search input, #settings_search textarea');
        if (search && !search.dataset.sfast) {
            search.dataset.sfast = 'yes';
            search.addEventListener('input', () => {
                if (search.value.trim() !== '' && !open) {
                    open = true;
                    fold();
                }
            });
        }
    }

    onUiLoaded(start);
    if (typeof onAfterUiUpdate === 'function') {
        // a host may write the heading anew
        onAfterUiUpdate(fold);
    }
})();
