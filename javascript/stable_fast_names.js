// Names for screen readers: gradio gives none to numbers next to sliders and to the chart.

(function() {
    function nameNumbers() {
        document.querySelectorAll('[id^="setting_sfast_"] input[type="number"]').forEach((input) => {
            const setting = input.closest('[id^="setting_sfast_"]');
            const label = setting.querySelector('label');
            if (label && !input.hasAttribute('aria-labelledby')) {
                label.id = label.id || `${setting.id}_label`;
                input.setAttribute('aria-labelledby', label.id);
            }
        });
    }

    function nameChart() {
        document.querySelectorAll('#stable_fast_plot img').forEach((image) => {
            image.alt = 'Bars of the last measurement. Its numbers are in the table.';
        });
    }

    function start() {
        nameNumbers();
        const plot = document.getElementById('stable_fast_plot');
        if (plot) {
            // a chart is drawn long after the page
            new MutationObserver(nameChart).observe(plot, {childList: true, subtree: true});
        }
    }

    onUiLoaded(start);
})();
